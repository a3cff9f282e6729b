"""Keeps a forked copy of this process, made after its imports and before any work, until a child is needed.

Importing PyTorch and transformers takes seconds of CPU time, which a child started as a new program spends again. A
fork is safe only before any library has begun to compute, because threads of OpenMP and CUDA do not survive a fork. So
only a command that has a process to itself forks a copy (see `allow`), as its first step.

```
command                                   its copy
keep()   forks                   ->       imports what only the copy needs, and waits
spare.start(arguments, ...)      ->       raises Become through the copied frames;
                                          `verbatim.cli.main` catches it and runs the command with these arguments
```
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, ClassVar, NoReturn

from verbatim.core.children import end_with_parent

_POLL = 0.01
"""Polling interval in seconds; `waitpid` has no timeout."""
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
"""If one of these devices exists, a library may have opened it on import, and a forked copy could not use it."""


class Become(BaseException):
    """Raised in a copy to make it run a command."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(arguments)
        self.arguments = arguments


class Spare:
    """A waiting copy; after `start` it behaves like a `subprocess.Popen`."""

    allowed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        self._parent = os.getpid()
        # Flush before the fork: otherwise both processes would print what is buffered.
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the stream was closed before Python started
            stream.flush()
        self.pid = os.fork()
        self.returncode: int | None = None
        os.close(self._reads if self.pid else self._writes)

    def start(self, arguments: Sequence[str], *, quiet: bool, errors: IO[bytes]) -> None:
        """Run one of our commands in the copy.

        Args:
            arguments: The arguments after `verbatim`.
            quiet: True to discard the command's standard output.
            errors: The file for the command's standard error.
        """
        order = {"arguments": list(arguments), "quiet": quiet, "errors": errors.name, "folder": os.getcwd()}
        with open(self._writes, "wb") as pipe:
            pipe.write(json.dumps(order).encode())

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        began = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired("verbatim", timeout)
            time.sleep(_POLL)
        return status

    def become(self, imports: Sequence[str]) -> NoReturn:
        """In the copy: import the modules, wait for the command, and exit if no command arrives.

        Raises:
            Become: raised with the command's arguments.
        """
        os.setsid()  # a session of its own, as for every child
        end_with_parent(self._parent)
        for module in imports:
            with contextlib.suppress(ImportError):  # the code that needs the module reports this later
                importlib.import_module(module)
        with open(self._reads, "rb") as pipe:
            received = pipe.read()
        if not received:  # the parent closed the pipe without starting the copy
            os._exit(0)
        order = json.loads(received)
        os.chdir(order["folder"])
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        if order["quiet"]:
            os.dup2(nothing, 1)
        with Path(order["errors"]).open("ab") as errors:
            os.dup2(errors.fileno(), 2)
        Path("/proc/self/comm").write_text(f"verbatim-{order['arguments'][0]}"[:15], encoding="ascii")  # for `ps`
        logging.getLogger().handlers.clear()
        random.seed()  # every copy has inherited the same state
        raise Become(order["arguments"])


_kept: list[Spare] = []


def allow() -> None:
    """Called by a command that has this process to itself: permit `keep` to fork it."""
    Spare.allowed = sys.platform == "linux" and not any(map(os.path.exists, _ACCELERATORS))


def is_allowed() -> bool:
    """True if `keep` would fork this process."""
    return Spare.allowed


def keep(imports: Sequence[str] = ()) -> None:
    """Fork this process, and keep the copy for the next `take`. Does nothing if the system does not allow another
    process.

    Args:
        imports: Modules that the copy imports before it is needed.

    Raises:
        Become: raised in the copy, when it is started.
    """
    with contextlib.suppress(OSError):
        _kept.append(Spare())
    if _kept and not _kept[-1].pid:  # this is the copy
        _kept.pop().become(imports)


def take() -> Spare | None:
    """Hand out the waiting copy, at most once; None if there is no copy or if the copy has ended."""
    spare = _kept.pop() if _kept else None
    return spare if spare is not None and spare.poll() is None else None
