"""Limits the memory of a process and all its descendants together, and reports when they exceed the limit.

The kernel enforces RLIMIT_DATA for each process, but that counts neither a process's children nor shared memory. If a
control group can be created, the kernel limits those too. In any case /proc is polled several times a second.
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
"""Seconds between two checks."""
OF_KERNEL_MB = 32
"""MiB that a control group allows on top, for the kernel's own memory of the processes. A single process that allocates
too much then hits RLIMIT_DATA first: its allocation fails, and it is not killed."""
_OWN = ("RssAnon:", "RssShmem:")
"""Lines of /proc/PID/status: the memory of one process, with shared pages counted in full."""
_SHARE = ("Pss_Anon:", "Pss_Shmem:")
"""Lines of /proc/PID/smaps_rollup: the same, with shared pages divided among the processes that share them."""


def descendants(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """A process and all its living descendants."""
    seen, left = {pid}, [pid]
    while left:
        yield (pid := left.pop())
        try:
            threads = os.listdir(proc / str(pid) / "task")
        except OSError:  # the process has ended
            continue
        for thread in threads:
            for child in map(int, _read(proc / str(pid) / "task" / thread / "children").split()):
                if child not in seen:
                    seen.add(child)
                    left.append(child)


def held_kb(pid: int, proc: Path = Path("/proc"), *, at_most: int | None = None) -> int:
    """The memory of a process and its descendants in KiB, without mapped files; shared pages count once.

    Args:
        pid: The process.
        proc: The proc file system.
        at_most: A limit in KiB. A cheap upper bound, which counts shared pages once per process, is returned if it does
            not exceed the limit; None: always the exact sum.
    """
    found = list(descendants(pid, proc))
    held = sum(_kb(proc / str(one) / "status", _OWN) or 0 for one in found)
    if at_most is not None and held <= at_most:
        return held
    shares = [(_kb(proc / str(one) / "smaps_rollup", _SHARE), proc / str(one) / "status") for one in found]
    return sum((_kb(status, _OWN) or 0) if share is None else share for share, status in shares)


@dataclass(frozen=True, eq=False)
class WatchedProcess:
    """A process whose memory, with that of its descendants, is watched."""

    pid: int
    """The process's id."""
    most_kb: int
    """Limit in KiB."""
    on_too_much: Callable[[], None]
    """Called once, from the watching thread, when the limit is exceeded."""
    group: MemoryGroup | None
    """The control group that enforces the limit; None if there is none, so that only polling detects an excess."""

    @property
    def was_ended(self) -> bool:
        """True if the kernel has killed one of the processes because the group exceeded its limit."""
        return self.group is not None and self.group.has_killed

    @property
    def holds_too_much(self) -> bool:
        """True if the processes exceed the limit, or one was killed for it."""
        if self.was_ended:
            return True
        return held_kb(self.pid, at_most=self.most_kb) > self.most_kb


class MemoryWatch:
    """Polls the memory of groups of processes, in a thread that runs while there are any.

    Args:
        interval: Seconds between two checks.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._watched: set[WatchedProcess] = set()
        self._left: set[MemoryGroup] = set()
        """Groups that are no longer needed but could not be removed yet, because they still have a process."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, memory_mb: int, on_too_much: Callable[[], None], *, files_mb: int = 0) -> WatchedProcess:
        """Start to watch a process and its descendants.

        Args:
            pid: The process: a child of this one that has not been waited for, so that its id cannot be reused.
            memory_mb: Limit in MiB on their memory together.
            on_too_much: Called once, from another thread, when they exceed the limit.
            files_mb: MiB of files that they may keep in memory (tmpfs), which a control group counts too.
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
        """Stop watching a process. May be called more than once."""
        with self._lock:
            self._watched -= {watched}
            if watched is not None and watched.group is not None:
                self._left.add(watched.group)
            # A group with a dying process cannot be removed yet: try all of these again.
            self._left = {group for group in self._left if not group.remove()}

    def look(self) -> None:
        """Check each watched process once."""
        with self._lock:
            now = list(self._watched)
        for watched in now:
            if not watched.holds_too_much:
                continue
            with self._lock:  # `remove` may have come first, and the callback must be called only once
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
"""The watch shared by all sandboxes of this process."""


def _kb(path: Path, names: tuple[str, ...]) -> int | None:
    """The sum of the lines with these names, in KiB; None if the file cannot be read or has no such line."""
    found = [int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names)]
    return sum(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
