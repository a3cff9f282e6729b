"""Ends what a program without a sandbox leaves behind, daemons too."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

VARIABLE = "VERBATIM_PROGRAM_ID"
"""The environment variable that marks the processes of one program: what they start inherits it."""
_MOST_ROUNDS = 100


def kill_marked(mark: str, proc: Path = Path("/proc")) -> int:
    """Kill every process that began with this mark in its environment, also in sessions of their own, until there is
    none: they may start others meanwhile. Returns how many were killed.

    Linux only; elsewhere there is nothing to read, and nothing is killed. A process that began with another environment
    is not found.
    """
    sought, killed = f"{VARIABLE}={mark}".encode(), set[int]()
    for _ in range(_MOST_ROUNDS):
        found = [pid for pid in _processes(proc) if _has(proc / str(pid) / "environ", sought)]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    return len(killed)


def _processes(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit() and int(name) != os.getpid()]
    except OSError:
        return []


def _has(environ: Path, sought: bytes) -> bool:
    try:
        return sought in environ.read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
