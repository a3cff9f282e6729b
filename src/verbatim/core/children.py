"""Starts the processes that a run needs, and ends them.

A child leads a session and a group of its own: Ctrl-C in the terminal is for this process, which ends its children in
order, and what a child has started ends with its group. Where a child cannot look after its own children (a server
that forks workers with sessions of their own), `inference.vllm.subreaper` stands between.

```
run_program      a program that does its work and ends: a compiler, pip, a question to another Python
start            a process of our own package, watched from a thread (trainer, ranks)
start_async      one that is watched from the event loop (workers, sandboxes, programs, servers)
end_with_parent  called by a child: it does not outlive the process that started it
```
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from verbatim.core.disk import make_private

Stream: TypeAlias = int | IO[bytes] | None
"""A pipe (`subprocess.PIPE`), nothing (`subprocess.DEVNULL`), a file, or None: this process's own."""

_PR_SET_PDEATHSIG = 1
_LONGEST_READ = 2**16
"""Bytes of a line that a pipe's reader holds, as in asyncio."""
_LOOK_EVERY = 0.5
"""Seconds between two looks whether the parent is there, where the kernel does not tell."""


def run_program(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    given: bytes | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, and return its status and what it wrote. One that takes too long is killed with all
    that it has started, also where the wait for it is interrupted.

    Args:
        command: Program and arguments.
        timeout: Seconds that it may take; None: any.
        given: What it reads from its standard input; None: nothing.
        environment: Its environment variables; None: those of this process.
        folder: Its working directory; None: that of this process.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it did not end in time.
    """
    process = start(
        command,
        stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        environment=environment,
        folder=folder,
    )
    with process:
        try:
            written, errors = process.communicate(given, timeout=timeout)
        except BaseException:
            kill_group(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, written, errors)


def start(
    command: Sequence[str],
    *,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """A child that leads a group of its own; the arguments are those of `run_program`.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )


class Child(asyncio.subprocess.Process):
    """A child that the event loop watches, with what connects it to the loop."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        protocol: asyncio.subprocess.SubprocessStreamProtocol,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, protocol, loop)
        self.transport = transport


async def start_async(
    command: Sequence[str],
    *,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    descriptors: Sequence[int] = (),
) -> Child:
    """The same for the event loop. Where this is cancelled, the child is killed before the error goes on: asyncio
    would wait for ever for pipes that were never connected.

    Args:
        descriptors: Open files that it inherits, under the same numbers.
    """
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(
        loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(_LONGEST_READ, loop),
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
        )
    )
    try:
        return Child(*await asyncio.shield(starting), loop)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # it could not be started
            process = Child(*await starting, loop)
            kill_group(process.pid)
            await gone(process)
        raise


async def gone(process: Child) -> None:
    """Wait for the end of a killed child. Our ends of its pipes are closed first: asyncio waits for the other ends
    too, and a process in a session of its own outlives the child and holds them."""
    for number in range(3):  # until Python 3.13, wait() waits for the pipes
        pipe: Any = process.transport.get_pipe_transport(number)
        if pipe is None:
            continue
        if number == 0 and (not pipe.is_closing() or pipe.get_write_buffer_size()):
            pipe.abort()  # what nothing reads any more is not waited for
        pipe.close()
    await process.wait()
    process.transport.close()


def open_log(path: Path) -> IO[bytes]:
    """A file for what children print, which its owner alone may read; what is in it stays.

    Raises:
        OSError: it cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)
    return path.open("ab")


class StartedChild(Protocol):
    """A child, as a program that was started or as a copy of this process (`core.spare`)."""

    pid: int

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; a `subprocess.TimeoutExpired` where it still runs after so many seconds."""


def end(process: StartedChild, patience: float) -> None:
    """Wait for a child that was told to end, and kill its group where it does not. No SIGTERM is sent: our own
    processes take it for a request to stop the run, and one that is frozen does not hear it.

    Args:
        process: May have ended.
        patience: Seconds to wait.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
        return
    kill_group(process.pid)
    process.wait()


def kill_group(leader: int) -> None:
    """Kill a child that leads a group, and what it has started, but for processes in groups of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def how_it_ended(status: int) -> str:
    """For messages.

    >>> how_it_ended(3), how_it_ended(-9)
    ('ended with status 3', 'was ended by SIGKILL')
    """
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def end_with_parent(parent: int) -> None:
    """Called by a child: have the kernel kill this process when its parent ends, for whatever reason; where the system
    is not Linux, a thread looks.

    Args:
        parent: Process id of the parent, as the parent told it: it may have ended already.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
    if sys.platform != "linux":
        threading.Thread(target=_look_for_parent, args=(parent,), name="look-for-parent", daemon=True).start()


def _look_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os._exit(1)


def prctl(option: int, value: int) -> None:
    """The system call of this name; nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def text_of(written: bytes) -> str:
    """What a program has written, whatever bytes it wrote."""
    return written.decode(errors="replace")
