"""Bounds the memory of a process and its descendants by a control group of the kernel, where one can be made.

The kernel keeps such a limit at every moment. A group can be made by root, and by a user to whom the system has given
the folder of its own group (systemd does with `Delegate=yes`). Both versions of control groups are known.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_NAME = "verbatim-{pid}-{number}"
_NUMBERS = itertools.count()


class MemoryGroup:
    """A control group with a limit, made by `MemoryGroup.make`.

    Args:
        folder: Of the group.
        is_first: Whether it is of version 1 of control groups.
    """

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        self.folder = folder
        self._kills = folder / ("memory.oom_control" if is_first else "memory.events")

    @classmethod
    def make(cls, memory_mb: int, proc: Path = Path("/proc")) -> MemoryGroup | None:
        """A group inside of this process's own. None where the system has none, or does not allow it.

        Args:
            memory_mb: MiB that its processes may hold together; those of files that they read are given back first.
            proc: Where the system tells of this process.
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
        except OSError:  # the memory of groups below this one is not the kernel's business
            group.remove()
            return None
        with contextlib.suppress(OSError):  # without swap there is no such file
            _write(folder / limits[1], memory_mb << 20 if is_first else 0)
        with contextlib.suppress(OSError):  # version 1 ends one process only
            _write(folder / "memory.oom.group", 1)
        return group

    def take(self, pids: Iterable[int]) -> bool:
        """Put processes in; what they start from then on is in it too. False where the system does not allow it."""
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    _write(self.folder / "cgroup.procs", pid)
        except OSError:
            return False
        return True

    @property
    def has_killed(self) -> bool:
        """Whether the kernel has ended a process of the group, because there was no memory left."""
        try:
            lines = self._kills.read_text(encoding="ascii").splitlines()
        except OSError:
            return False
        return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines if line)

    def remove(self) -> bool:
        """Remove it. False while a process is in it."""
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _own_group(proc: Path) -> tuple[Path | None, bool]:
    """The folder of this process's group that bounds memory, and whether it is of version 1."""
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
    """Remove the groups of processes of ours that were killed."""
    for folder in parent.glob(_NAME.format(pid="[0-9]*", number="[0-9]*")):
        if not (proc / folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):  # a process is in it
                folder.rmdir()


def _inside(mounts: Iterable[Path], path: str) -> Path | None:
    """The folder of a group; in a container its path may be another one than that from inside."""
    for mount in mounts:
        for folder in (mount / path.lstrip("/"), mount):
            if (folder / "cgroup.procs").is_file():
                return folder
    return None


def _write(path: Path, value: int) -> None:
    # Opened without O_CREAT: in a folder that is no group nothing is made.
    with open(os.open(path, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(str(value))
