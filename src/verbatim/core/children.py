"""Starts and ends child processes.

Every child leads its own session and process group. So Ctrl-C in the terminal reaches only this process, which then
ends its children in order. Everything that a child has started ends with the child's group. A server whose workers run
in separate sessions cannot be ended in this way; `inference.vllm.subreaper` starts such a server, and ends its workers
too.

```
run_program      for a program that runs to its end: a compiler, pip, a query of another Python
start            for a process of our own package that a thread watches (trainer, ranks)
start_async      for a process that the event loop watches (workers, sandboxes, programs, servers)
end_with_parent  called by a child so that it does not outlive its parent
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
"""A pipe (`subprocess.PIPE`), no stream (`subprocess.DEVNULL`), a file, or None for this process's own stream."""

_PR_SET_PDEATHSIG = 1
_LONGEST_READ = 2**16
"""Limit in bytes of the buffer from which a pipe is read; equal to asyncio's default."""
_LOOK_EVERY = 0.5
"""Interval in seconds at which a child checks for its parent, on systems without PR_SET_PDEATHSIG."""


def run_program(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    given: bytes | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, and return its exit status and output. On a timeout, or if the wait is interrupted,
    the program and everything that it has started are killed.

    Args:
        command: Program and arguments.
        timeout: Timeout in seconds, or None for no timeout.
        given: Bytes for the program's standard input, or None for an empty standard input.
        environment: The program's environment variables, or None for this process's variables.
        folder: The program's working directory, or None for this process's working directory.

    Raises:
        OSError: the program cannot be started.
        subprocess.TimeoutExpired: the program did not end in time.
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
    """Start a child in a new process group. `command`, `environment` and `folder` mean the same as for `run_program`.

    Raises:
        OSError: the child cannot be started.
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
    """A child that the event loop watches, together with its asyncio transport."""

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
    """Start a child as `start` does, but let the event loop watch it. On cancellation the child is killed before the
    error is raised, because asyncio would otherwise wait forever for pipes that were never connected.

    Args:
        descriptors: File descriptors that the child inherits, under the same numbers.
    """
    loop = asyncio.get_running_loop()
    # The shield lets the start finish when this coroutine is cancelled, so that the process can be killed once it
    # exists.
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
        with contextlib.suppress(OSError):  # the child could not be started, so there is nothing to kill
            process = Child(*await starting, loop)
            kill_group(process.pid)
            await gone(process)
        raise


async def gone(process: Child) -> None:
    """Close our ends of a killed child's pipes, then wait for the child's end. If the pipes stayed open, asyncio would
    wait for every process that holds them, and a process that has moved to a new session may outlive the child."""
    for number in range(3):  # until Python 3.13, wait() waits for the pipes
        pipe: Any = process.transport.get_pipe_transport(number)
        if pipe is None:
            continue
        if number == 0 and (not pipe.is_closing() or pipe.get_write_buffer_size()):
            pipe.abort()  # a plain close would first wait to write data that nobody reads any more
        pipe.close()
    await process.wait()
    process.transport.close()


def open_log(path: Path) -> IO[bytes]:
    """Open a file for a child's output, appending to what it contains; only its owner may read it.

    Raises:
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)
    return path.open("ab")


class StartedChild(Protocol):
    """A child process: a program that was started, or a copy of this process (`core.spare`)."""

    pid: int

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the child runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired` if the child still runs after `timeout` seconds."""


def end(process: StartedChild, patience: float) -> None:
    """Wait for a child that was told to end, and kill its process group if it does not end. SIGTERM is not sent: our
    own processes treat it as a request to stop the run, and a frozen process does not handle it.

    Args:
        process: The child; it may have ended already.
        patience: Timeout in seconds.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
        return
    kill_group(process.pid)
    process.wait()


def kill_group(leader: int) -> None:
    """Kill a group leader and everything that it has started, except processes that have moved to other groups."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def how_it_ended(status: int) -> str:
    """A clause for messages that says how a process with this exit status ended.

    >>> how_it_ended(3), how_it_ended(-9)
    ('ended with status 3', 'was ended by SIGKILL')
    """
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def end_with_parent(parent: int) -> None:
    """Called by a child process: end this process when its parent ends, for any reason. On Linux the kernel does this;
    on other systems a thread polls.

    Args:
        parent: Process id of the parent. The parent itself passes its id, because it may have ended before the child
            asks.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call, so the kernel sends no signal
        os._exit(1)
    if sys.platform != "linux":
        threading.Thread(target=_look_for_parent, args=(parent,), name="look-for-parent", daemon=True).start()


def _look_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    os._exit(1)


def prctl(option: int, value: int) -> None:
    """Make the Linux system call `prctl`; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def text_of(written: bytes) -> str:
    """A program's output as text; invalid bytes are replaced."""
    return written.decode(errors="replace")
