"""Bounds the memory that a process and all its descendants hold together, and says who holds too much.

The limit on the data of one process (RLIMIT_DATA) is the kernel's, and cannot be passed by. It counts neither the
children of a process together nor memory that is shared. Where a control group can be made, the kernel bounds those
too; everywhere they are looked at in /proc, several times a second.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.environments.tools.control_groups import MemoryGroup

logger = logging.getLogger(__name__)

INTERVAL = 0.25
"""Seconds between two looks."""
OF_KERNEL_MB = 32
"""MiB that a control group allows more, for what the kernel keeps of processes: one that takes too much at once is then
refused by its own limit on data, and not killed."""
_OWN = ("RssAnon:", "RssShmem:")
_SHARE = ("Pss_Anon:", "Pss_Shmem:")


def descendants(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """A process, its children, and theirs, as far as they are alive."""
    seen, left = {pid}, [pid]
    while left:
        yield (pid := left.pop())
        try:
            threads = os.listdir(proc / str(pid) / "task")
        except OSError:  # it has ended
            continue
        for thread in threads:
            for child in map(int, _read(proc / str(pid) / "task" / thread / "children").split()):
                if child not in seen:
                    seen.add(child)
                    left.append(child)


def held_kb(pid: int, proc: Path = Path("/proc"), *, at_most: int | None = None) -> int:
    """KiB of memory that a process and its descendants hold together: not files that are mapped, and once what several
    of them share.

    Args:
        pid: The process.
        proc: Where the system tells of its processes.
        at_most: What is added up first counts shared pages for each process; where that is no more, it is the answer.
    """
    found = list(descendants(pid, proc))
    held = sum(_kb(proc / str(one) / "status", _OWN) or 0 for one in found)
    if at_most is not None and held <= at_most:
        return held
    shares = [(_kb(proc / str(one) / "smaps_rollup", _SHARE), proc / str(one) / "status") for one in found]
    return sum((_kb(status, _OWN) or 0) if share is None else share for share, status in shares)


@dataclass(frozen=True, eq=False)
class WatchedProcess:
    """A process whose memory is looked at."""

    pid: int
    most_kb: int
    on_too_much: Callable[[], None]
    """Called from the watching thread, once."""
    group: MemoryGroup | None
    """Bounds them by the kernel; None where it cannot."""

    @property
    def was_ended(self) -> bool:
        """Whether the kernel has ended one of them, because together they held too much."""
        return self.group is not None and self.group.has_killed

    @property
    def holds_too_much(self) -> bool:
        """Whether they hold too much, or one of them was ended for it."""
        if self.was_ended:
            return True
        return held_kb(self.pid, at_most=self.most_kb) > self.most_kb


class MemoryWatch:
    """Looks at the memory of groups of processes, in a thread that runs while there are any.

    Args:
        interval: Seconds between two looks.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._watched: set[WatchedProcess] = set()
        self._left: set[MemoryGroup] = set()
        """Groups that are no longer needed, and could not be removed yet."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, memory_mb: int, on_too_much: Callable[[], None], *, files_mb: int = 0) -> WatchedProcess:
        """Look at a process and its descendants from now on.

        Args:
            pid: The process, a child of this one that has not been waited for.
            memory_mb: MiB that they may hold together.
            on_too_much: Called from another thread, once, when they hold more.
            files_mb: MiB of files that they may hold in memory beside it, which a control group counts too.
        """
        group = MemoryGroup.make(memory_mb + files_mb + OF_KERNEL_MB)
        if group is not None and not group.take(descendants(pid)):
            group.remove()
            group = None
        watched = WatchedProcess(pid, memory_mb << 10, on_too_much, group)
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="verbatim-memory", daemon=True)
                self._thread.start()
        return watched

    def remove(self, watched: WatchedProcess | None) -> None:
        """Look at it no more. May be called again."""
        with self._lock:
            self._watched -= {watched}
            if watched is not None and watched.group is not None:
                self._left.add(watched.group)
            self._left = {group for group in self._left if not group.remove()}  # those that still have a process

    def look(self) -> None:
        """Look at all of them once."""
        with self._lock:
            now = list(self._watched)
        for watched in now:
            if not watched.holds_too_much:
                continue
            with self._lock:
                is_here = watched in self._watched
                self._watched.discard(watched)
            if is_here:
                watched.on_too_much()

    def _run(self) -> None:
        while True:
            self.look()
            self._changed.wait(self._interval)
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return


WATCH = MemoryWatch()
"""The one of this process."""


def _kb(path: Path, names: tuple[str, ...]) -> int | None:
    """The sum of the lines with these names, in KiB; None where it cannot be read, or has none of them."""
    found = [int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names)]
    return sum(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""
