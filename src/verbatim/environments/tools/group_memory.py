"""Limits the total memory of a process and all its descendants, and reports when they exceed the limit.

The kernel enforces RLIMIT_DATA for each process, but RLIMIT_DATA counts neither the children of the process nor shared
memory. If a control group can be created, the kernel limits these too. In any case /proc is polled several times a
second.
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
"""Seconds between two checks of the memory of watched processes."""
OF_KERNEL_MB = 32
"""MiB that are added to the limit of a control group, for the memory that the kernel itself needs for the processes.
With this allowance, a single process that allocates too much hits RLIMIT_DATA first: its allocation fails, and the
process is not killed."""
_OWN = ("RssAnon:", "RssShmem:")
"""Lines of /proc/PID/status that give the memory of one process, with shared pages counted in full."""
_SHARE = ("Pss_Anon:", "Pss_Shmem:")
"""Lines of /proc/PID/smaps_rollup that give the memory of one process, with shared pages divided among the processes
that share them."""


def descendants(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Iterate over the ids of a process and of all its living descendants."""
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
    """Return the total memory of a process and its descendants in KiB, without mapped files. Shared pages count once.

    Args:
        pid: The process id.
        proc: The proc file system.
        at_most: A limit in KiB, or None to always compute the exact sum. With a limit, a cheap upper bound is computed
            first, in which shared pages count once per process; if this bound does not exceed the limit, it is
            returned.
    """
    found = list(descendants(pid, proc))
    held = sum(_kb(proc / str(one) / "status", _OWN) or 0 for one in found)
    if at_most is not None and held <= at_most:
        return held
    shares = [(_kb(proc / str(one) / "smaps_rollup", _SHARE), proc / str(one) / "status") for one in found]
    return sum((_kb(status, _OWN) or 0) if share is None else share for share, status in shares)


@dataclass(frozen=True, eq=False)
class WatchedProcess:
    """A process whose memory is watched together with the memory of its descendants."""

    pid: int
    """The process's id."""
    most_kb: int
    """Limit in KiB on the total memory of the process and its descendants."""
    on_too_much: Callable[[], None]
    """Called once, from the watching thread, when the limit is exceeded."""
    group: MemoryGroup | None
    """The control group that enforces the limit; None if there is no such group, so that polling
    detects an excess."""

    @property
    def was_ended(self) -> bool:
        """True if the kernel has killed one of the processes because the group exceeded its limit."""
        return self.group is not None and self.group.has_killed

    @property
    def holds_too_much(self) -> bool:
        """True if the processes exceed the limit, or the kernel has killed one of them for exceeding it."""
        if self.was_ended:
            return True
        return held_kb(self.pid, at_most=self.most_kb) > self.most_kb


class MemoryWatch:
    """Polls the memory of watched processes, in a thread that runs as long as any process is watched.

    Args:
        interval: Seconds between two checks.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._watched: set[WatchedProcess] = set()
        self._left: set[MemoryGroup] = set()
        """Control groups that are no longer needed but could not be removed yet, because they still have a process."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, memory_mb: int, on_too_much: Callable[[], None], *, files_mb: int = 0) -> WatchedProcess:
        """Start to watch a process and its descendants, and return the watched process.

        Args:
            pid: Id of the process. It must be a child of this process that has not been waited for, so that its id
                cannot be reused.
            memory_mb: Limit in MiB on the total memory of the process and its descendants.
            on_too_much: Called once, from a different thread, when their memory exceeds the limit.
            files_mb: MiB of files that these processes may keep in memory (tmpfs). A control group counts files too.
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
            # A group with a dying process cannot be removed yet, so try all of these groups again.
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
"""The watch that all sandboxes of this process share."""


def _kb(path: Path, names: tuple[str, ...]) -> int | None:
    """Return the sum of the lines with these names, in KiB; None if the file cannot be read or has no such line."""
    found = [int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names)]
    return sum(found) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
