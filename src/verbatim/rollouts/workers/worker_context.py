"""Gives workers the driver's working directory and search path."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A process's working directory and search path."""

    folder: str
    """The working directory."""
    search_path: tuple[str, ...]
    """`sys.path`, absolute."""

    @classmethod
    def current(cls) -> WorkerContext:
        """The context of this process."""
        return cls(folder=str(Path.cwd()), search_path=tuple(os.path.abspath(entry) for entry in sys.path))

    def apply(self) -> None:
        """Adopt it as far as this host has the folders, so that relative paths and imports mean the same.

        Packages installed on this host come first.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        known = set(map(os.path.abspath, sys.path))
        sys.path.extend(entry for entry in self.search_path if entry not in known)

    def apply_exactly(self) -> None:
        """Adopt it in another process of the same machine: the same search path in the same order."""
        os.chdir(self.folder)
        sys.path[:] = self.search_path
