"""Runs one server and ends its descendants: `python subreaper.py SECONDS COMMAND...`.

A server forks workers that outlive it when it is killed. This process adopts these workers (as a Linux "child
subreaper") and kills all of them once the server has ended, or once its own standard input is closed. Standard input is
a pipe, which the kernel closes when the process that started the subreaper ends, even by SIGKILL. This module imports
only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PATIENCE = 15.0
"""Seconds between SIGTERM and SIGKILL, and also the time limit for reaping all descendants of a killed server."""
_LOOK_EVERY = 0.2
"""Seconds between two checks of the server and of standard input."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>


def main(command: Sequence[str], patience: float = PATIENCE) -> int:
    """Run the command until it ends, or until standard input is closed.

    Args:
        command: The server's command line.
        patience: Seconds between SIGTERM and SIGKILL.

    Returns:
        The server's exit status, or 128 + N if signal N ended it.
    """
    # Ctrl-C reaches the whole process group; only the process at the other end of stdin decides when the server ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # PLW1509: preexec_fn is unsafe only with several threads, and this process has one. If this process is killed by
    # SIGKILL, the kernel kills the server.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)  # noqa: PLW1509
    try:
        while server.poll() is None and not _is_closed(0):
            pass
        if server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(patience)
    finally:
        server.kill()
        status = server.wait()
        _kill_descendants()
    return status if status >= 0 else 128 - status


def _is_closed(descriptor: int) -> bool:
    """True if the descriptor is at end of file. Waits up to `_LOOK_EVERY` seconds for the end of file."""
    readable, _, _ = select.select([descriptor], [], [], _LOOK_EVERY)
    return bool(readable) and not os.read(descriptor, 1)


def _kill_descendants() -> None:
    """Kill and reap until no child is left.

    One pass is not enough. The children of a killed child become children of this process only once all threads of that
    child have ended, and until then the killed child is a zombie that cannot be reaped.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and (children := list(_children())):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _children() -> Iterator[int]:
    """Process ids of this process's children, zombies included; empty if the system does not list them."""
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, task.read_text().split())


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], float(sys.argv[1])))
