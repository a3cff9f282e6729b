"""Remembers which folders of the run folder are in the object store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from verbatim.run.cluster.folders import ShippedFolder, ship

_KEPT = 2
"""Number of most recent folders that stay in the object store: two versions of the weights, or models before training.
Ray removes an object once nobody refers to it."""


class Shipments:
    """The folders of a run that are in the object store. Thread-safe.

    Args:
        ray: The package, connected.
        root: The run folder on this machine.
    """

    def __init__(self, ray: Any, root: Path) -> None:
        self._ray, self.root = ray, root
        self._known: OrderedDict[Path, ShippedFolder] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> ShippedFolder:
        """A folder in the object store; it is put there first if necessary.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            if path not in self._known:
                self._known[path] = ship(self._ray, self.root, path.relative_to(self.root).as_posix())
            self._keep(path)
            return self._known[path]

    def note(self, path: Path, shipped: ShippedFolder) -> None:
        """Remember a folder that a node put into the store; it is in the run folder too."""
        with self._lock:
            self._known[path] = shipped
            self._keep(path)

    def forget(self, path: Path) -> None:
        """Forget a folder whose objects are lost; the next call of `of` puts it into the store again."""
        with self._lock:
            self._known.pop(path, None)

    def forget_all(self) -> None:
        """Forget all folders."""
        with self._lock:
            self._known.clear()

    def _keep(self, path: Path) -> None:
        self._known.move_to_end(path)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
