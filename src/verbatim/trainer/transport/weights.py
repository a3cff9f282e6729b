"""Publishes weights as one folder per policy version, from which the sampler loads them. A folder is either complete or
absent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_TEMPORARY = ".tmp??????"
"""Pattern of safetensors' temporary files. If a published version contains such a file, a power loss undid the file's
renaming."""


class WeightFolders:
    """`{folder}/v000012` holds the weights of policy version 12.

    Args:
        folder: The parent folder. Incomplete versions, left by a killed process or a power loss, are removed.
        keep: Number of newest versions to keep. A sampler that may be k versions behind needs k + 2 versions: the
            version that it reads is k behind the newest, and one more version is being written.
        keeps_newer: True to keep versions with higher numbers than the one that is published: the trainer restarted
            from a checkpoint within its run, and the sampler still reads them. Otherwise a process that was killed
            before its checkpoint has left them.
    """

    def __init__(self, folder: Path, keep: int = 2, *, keeps_newer: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._keeps_newer = keeps_newer
        for left in folder.glob(".v[0-9]*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        for damaged in {path.parent for path in folder.glob(f"v[0-9]*/{_TEMPORARY}")}:
            if re.fullmatch(r"v\d{6,}", damaged.name):
                shutil.rmtree(damaged, ignore_errors=True)

    def publish(self, version: int, write: Callable[[Path], None]) -> Path:
        """Write a version into a temporary folder, remove old versions, then rename the folder atomically."""
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
            number = int(stale.name[1:])
            is_left = number == version or (number > version and not self._keeps_newer)
            if is_left or number <= version - self._keep:
                shutil.rmtree(stale)
        # The renaming is atomic: a sampler never sees part of a version.
        os.rename(partial, target)
        return target


def folder_bytes(folder: Path) -> int:
    """Total size of the files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
