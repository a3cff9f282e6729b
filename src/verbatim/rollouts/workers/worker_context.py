"""The driver's working directory and search path, which a worker takes over."""

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
        """This process's own."""
        return cls(folder=str(Path.cwd()), search_path=tuple(os.path.abspath(entry) for entry in sys.path))

    def apply(self) -> None:
        """Work there, as far as this host has the folders: then relative paths and imports mean what they meant.

        What this host has installed itself comes first.
        """
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        known = set(map(os.path.abspath, sys.path))
        sys.path.extend(entry for entry in self.search_path if entry not in known)

    def apply_exactly(self) -> None:
        """The same in another process of the same machine: it searches where the driver does, in that order."""
        os.chdir(self.folder)
        sys.path[:] = self.search_path
