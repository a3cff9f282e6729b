"""Keeps a copy of this process, forked when its modules are imported and nothing has begun, until a child is needed.

PyTorch and transformers take seconds of the processor to import, which a child that is started as a new program pays
again. A copy may only be made while no library has begun to compute: threads of OpenMP and CUDA do not survive a fork.
So only a command that has a process to itself makes one (`allow`), as its first step.

```
command                                   its copy
keep()   forks                   ->       imports what only it needs, waits
spare.start(arguments, ...)      ->       raises Become through the frames that it has copied
                                          `verbatim.cli.main` catches it, and runs the command of these arguments
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
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
"""Where one of these exists, a library that is only imported may have opened it, which a copy cannot use."""


class Become(BaseException):
    """Raised in a copy: the command that it is to be."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(arguments)
        self.arguments = arguments


class Spare:
    """A copy that waits; from `start` on a child as `subprocess.Popen` has it."""

    allowed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        self._parent = os.getpid()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before Python began
            stream.flush()
        self.pid = os.fork()
        self.returncode: int | None = None
        os.close(self._reads if self.pid else self._writes)

    def start(self, arguments: Sequence[str], *, quiet: bool, errors: IO[bytes]) -> None:
        """Run a command of ours in the copy.

        Args:
            arguments: Those behind `verbatim`.
            quiet: Whether what it prints goes nowhere.
            errors: The file for its standard error.
        """
        order = {"arguments": list(arguments), "quiet": quiet, "errors": errors.name, "folder": os.getcwd()}
        with open(self._writes, "wb") as pipe:
            pipe.write(json.dumps(order).encode())

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        began = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired("verbatim", timeout)
            time.sleep(_POLL)
        return status

    def become(self, imports: Sequence[str]) -> NoReturn:
        """In the copy: import, and wait for what it is to be; end where that never comes.

        Raises:
            Become: it has come.
        """
        os.setsid()
        end_with_parent(self._parent)
        for module in imports:
            with contextlib.suppress(ImportError):  # said by who needs it
                importlib.import_module(module)
        with open(self._reads, "rb") as pipe:
            said = pipe.read()
        if not said:
            os._exit(0)
        order = json.loads(said)
        os.chdir(order["folder"])
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        if order["quiet"]:
            os.dup2(nothing, 1)
        with Path(order["errors"]).open("ab") as errors:
            os.dup2(errors.fileno(), 2)
        Path("/proc/self/comm").write_text(f"verbatim-{order['arguments'][0]}"[:15], encoding="ascii")  # for `ps`
        logging.getLogger().handlers.clear()
        random.seed()
        raise Become(order["arguments"])


_kept: list[Spare] = []


def allow() -> None:
    """Said by a command that has this process to itself: `keep` may fork it."""
    Spare.allowed = sys.platform == "linux" and not any(map(os.path.exists, _ACCELERATORS))


def is_allowed() -> bool:
    """Whether `keep` would fork this process."""
    return Spare.allowed


def keep(imports: Sequence[str] = ()) -> None:
    """Fork this process; the copy is for the next `take`. Where the system allows no further process there is none.

    Args:
        imports: Modules that the copy imports before it is needed.

    Raises:
        Become: in the copy, when it is started.
    """
    with contextlib.suppress(OSError):
        _kept.append(Spare())
    if _kept and not _kept[-1].pid:  # this is the copy
        _kept.pop().become(imports)


def take() -> Spare | None:
    """The copy, once; None where there is none, or it has ended."""
    spare = _kept.pop() if _kept else None
    return spare if spare is not None and spare.poll() is None else None
