"""Takes the files that arrive from the trainer's host: appended in order, hashed on the way, named when whole."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from verbatim.core.disk import making
from verbatim.core.machine_faults import naming
from verbatim.trainer.transport.mirror.protocol import Files, files_of
from verbatim.trainer.transport.weights import WeightFolders

_WRITTEN_AT_ONCE = 2**20
"""Bytes that are gathered for one write."""
_MODELS = ("model", "warm_start")
"""Folders that a run may have from the start."""


class IncomingFile:
    """A file of which some bytes are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes that are there."""
        self._sha256 = hashlib.sha256()
        self._copied: str | None = None
        self._lock = asyncio.Lock()
        self._turn = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    async def append(self, offset: int, parts: AsyncIterator[bytes]) -> int:
        """Append bytes that begin at the offset; those of another offset are not taken.

        A newer call takes over from one whose connection broke and that still waits for bytes.

        Returns:
            Bytes that are there now.

        Raises:
            OSError: the system refused to write; what was written before counts.
        """
        self._turn += 1
        turn, waiting = self._turn, bytearray()
        try:
            async for part in parts:
                waiting += part
                if len(waiting) >= _WRITTEN_AT_ONCE:
                    if not await self._take(turn, offset, waiting):
                        return self.size
                    offset += len(waiting)
                    waiting = bytearray()
        finally:  # also of a connection that broke
            await self._take(turn, offset, waiting)
        return self.size

    async def _take(self, turn: int, offset: int, part: bytearray) -> bool:
        async with self._lock:
            if turn != self._turn or offset != self.size:
                return False
            await asyncio.to_thread(self._write, part)
            return True

    def _write(self, part: bytearray) -> None:
        with naming(self.path), self.path.open("r+b") as file:
            file.seek(self.size)  # what an earlier write left behind it counts for nothing
            file.write(part)
        self._sha256.update(part)
        self.size += len(part)

    def take_copy(self, source: Path, size: int, sha256: str) -> bool:
        """Take the bytes of another file, which never changes, instead; False if it is gone."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            return False
        except OSError:  # a file system without links
            shutil.copyfile(source, temporary)
        os.replace(temporary, self.path)
        self.size, self._copied = size, sha256
        return True

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that are there."""
        return self._copied or self._sha256.hexdigest()


class Incoming:
    """The folders that arrive from one trainer.

    Args:
        run: The run folder.
        landing: Where files are until their folder is whole; on the run folder's file system.
        weights: Where versions of the weights are published.
    """

    def __init__(self, run: Path, landing: Path, weights: WeightFolders) -> None:
        self._run, self._landing, self._weights = run, landing, weights
        self._files: dict[str, dict[str, IncomingFile]] = {}
        self._whole: dict[str, Files] = {}
        self._known: dict[str, Path] = {}
        self._lock = asyncio.Lock()

    def file(self, folder: str, name: str) -> IncomingFile | None:
        """A file that was announced and is not whole yet."""
        return self._files.get(folder, {}).get(name)

    async def announce(self, folder: str, files: Files) -> tuple[dict[str, int], list[str]]:
        """What is missing of a folder; once nothing is, it is published.

        Returns:
            Bytes that are there of each file that is not whole, and the files that had to be begun anew because
            their sha256 was another.

        Raises:
            OSError: the system refused to write.
        """
        async with self._lock:
            if self._whole.get(folder) == files:
                return {}, []
            if folder in _MODELS and await asyncio.to_thread(_is_there, self._run / folder, files):
                self._whole[folder] = files
                return {}, []
            mine = self._files.setdefault(folder, {})
            wrong = []
            for name, (size, sha256) in files.items():
                found = mine.get(name)
                if found is None:
                    mine[name] = found = IncomingFile(self._landing / folder / name)
                    if sha256 in self._known:
                        await asyncio.to_thread(found.take_copy, self._known[sha256], size, sha256)
                if found.size > size or (found.size == size and found.sha256 != sha256):
                    wrong.append(name)
                    found.path.unlink(missing_ok=True)  # another folder may hold the same file
                    mine[name] = IncomingFile(found.path)
            missing = {
                name: mine[name].size
                for name, (size, sha256) in files.items()
                if (mine[name].size, mine[name].sha256) != (size, sha256)
            }
            if not missing:
                await asyncio.to_thread(self._publish, folder, files)
                del self._files[folder]
                self._whole = {**dict(list(self._whole.items())[-8:]), folder: files}
            return missing, wrong

    def _publish(self, folder: str, files: Files) -> None:
        landed, target = self._landing / folder, self._run / folder
        if folder.startswith("weights/"):
            published = self._weights.publish(int(target.name[1:]), lambda partial: _move(landed, partial))
            self._known = {sha256: published / name for name, (_, sha256) in files.items()}
        elif folder.startswith("exchange/"):
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(landed, target)
        else:  # the model that the run begins with is kept, and has to survive a loss of power
            with making(target) as partial:
                _move(landed, partial)


def _is_there(folder: Path, files: Files) -> bool:
    return folder.is_dir() and files_of(folder) == files


def _move(source: Path, target: Path) -> None:
    for part in source.iterdir():
        os.rename(part, target / part.name)
    source.rmdir()
