"""Publishes weights as one folder for each policy version, complete or absent. The sampler loads them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = ".tmp??????"
"""What safetensors calls a file while it writes it. One in a published version has lost its name with the power."""


class WeightFolders:
    """`{folder}/v000012` holds the weights of policy version 12.

    Args:
        folder: Where they are. What a killed process or a loss of power left half written there is removed.
        keep: Newest versions kept. A sampler that may be k versions behind needs k + 2: one that it reads, and the one
            that is being written.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        for left in folder.glob(".v[0-9]*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        for damaged in {path.parent for path in folder.glob(f"v[0-9]*/{_TEMPORARY}")}:
            if re.fullmatch(r"v\d{6,}", damaged.name):
                shutil.rmtree(damaged, ignore_errors=True)

    def publish(self, version: int, write: Callable[[Path], None]) -> Path:
        """Write a version into a temporary folder, then give it its name in one step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"v{version:06d}"
        partial = self._folder / f".v{version:06d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for stale in self._folder.glob("v[0-9]*"):
            # At or above this version: left by a process that was killed after publishing, before its checkpoint.
            number = int(stale.name[1:])
            if number >= version or number <= version - self._keep:
                shutil.rmtree(stale)
        os.rename(partial, target)
        return target


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
