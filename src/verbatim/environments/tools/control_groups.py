"""Limits the memory of a process and its descendants with a Linux control group (cgroup), if one can be created.

The kernel enforces this limit at every moment, which polling cannot do. Root can create a control group, and so can a
user who owns the folder of their own control group (systemd: `Delegate=yes`). Both cgroup versions are supported.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_NAME = "verbatim-{pid}-{number}"
"""Name of a group's folder. From the pid, a later process knows whether the owner is still alive (`_remove_left`)."""
_NUMBERS = itertools.count()


class MemoryGroup:
    """A control group with a memory limit, created by `MemoryGroup.make`.

    Args:
        folder: The group's folder.
        is_first: True for cgroup version 1, False for version 2.
    """

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self.folder = folder
        self._kills = folder / ("memory.oom_control" if is_first else "memory.events")

    @classmethod
    def make(cls, memory_mb: int, proc: Path = Path("/proc")) -> MemoryGroup | None:
        """Create a group inside this process's own group. Return None if the system has no cgroups or does not permit
        it.

        Args:
            memory_mb: Limit in MiB on the total memory of the processes in the group. The page cache counts too, but
                the kernel reclaims that before it kills a process.
            proc: The proc file system.
        """
        parent, is_first = _own_group(proc)
        if parent is None:
            return None
        _remove_left(parent, proc)
        folder = parent / _NAME.format(pid=os.getpid(), number=next(_NUMBERS))
        try:
            folder.mkdir()
        except OSError:
            return None
        group = cls(folder, is_first=is_first)
        limits = (
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if is_first else ("memory.max", "memory.swap.max")
        )
        try:
            _write(folder / limits[0], memory_mb << 20)
        except OSError:  # the parent group does not delegate the memory controller, so the file does not exist
            group.remove()
            return None
        # The file limits memory and swap together in version 1, and swap alone in version 2. Both values permit no
        # swap.
        with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
            _write(folder / limits[1], memory_mb << 20 if is_first else 0)
        with contextlib.suppress(OSError):  # kill the whole group, not one process; version 1 cannot
            _write(folder / "memory.oom.group", 1)
        return group

    def take(self, pids: Iterable[int]) -> bool:
        """Move processes into the group; the children that they start from then on belong to it too. Returns False if
        that is not permitted."""
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    _write(self.folder / "cgroup.procs", pid)
        except OSError:
            return False
        return True

    @property
    def has_killed(self) -> bool:
        """True if the kernel has killed a process of the group because the group was out of memory."""
        try:
            lines = self._kills.read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines if line)

    def remove(self) -> bool:
        """Remove the group. Returns False if it cannot be removed yet, because it still has a process."""
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _own_group(proc: Path) -> tuple[Path | None, bool]:
    """Return (folder, is_first): the folder of this process's memory group, or None if there is none; and True for
    cgroup version 1, else False."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "self" / "mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None, False
    mounted = [(words[2], words[3].split(","), Path(words[1])) for words in map(str.split, mounts) if len(words) > 3]
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            first = (at for kind, options, at in mounted if kind == "cgroup" and "memory" in options)
            return _inside(first, path), True
    for _, controllers, path in groups:
        if not controllers:
            return _inside((at for kind, _, at in mounted if kind == "cgroup2"), path), False
    return None, False


def _remove_left(parent: Path, proc: Path) -> None:
    """Remove the groups whose owner was killed before it could remove them."""
    for folder in parent.glob(_NAME.format(pid="[0-9]*", number="[0-9]*")):
        if not (proc / folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):  # it still has a process
                folder.rmdir()


def _inside(mounts: Iterable[Path], path: str) -> Path | None:
    """Return the folder of a group, or None. In a container, /proc may give the group's path on the host, although the
    mount is the group itself; so the mount is tried too."""
    for mount in mounts:
        for folder in (mount / path.lstrip("/"), mount):
            if (folder / "cgroup.procs").is_file():
                return folder
    return None


def _write(path: Path, value: int) -> None:
    # Opened without O_CREAT, so that this fails and creates no plain file if the folder is not a control group.
    with open(os.open(path, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(str(value))
