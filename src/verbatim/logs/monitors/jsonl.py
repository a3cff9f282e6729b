"""Writes JSON lines so that a killed writer leaves at most the last line incomplete, and tracks the file's length."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.core.disk import make_folder, sync, sync_descriptor
from verbatim.core.errors import UsageError
from verbatim.core.formats import content_of
from verbatim.core.trajectory_json import plain

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LogMark:
    """Length and checksum of a log at some moment. The log only grows, so the part before a mark never changes."""

    size: int = 0
    """Length in bytes."""
    records: int = 0
    """Length in lines."""
    crc32: int = 0
    """CRC-32 of the first `size` bytes. It can be updated for the next line without reading the file again."""

    def after(self, line: bytes) -> LogMark:
        """The mark that the log has after one more line."""
        return LogMark(size=self.size + len(line), records=self.records + 1, crc32=zlib.crc32(line, self.crc32))


class JsonlWriter:
    """Appends records, each completely or not at all. If a killed process has left an incomplete last line, that line
    is cut off first.

    NaN and infinities, which JSON does not have, are written as the strings "NaN", "Infinity" and "-Infinity", which
    `float()` reads back.

    Args:
        path: The file; created, with its folder, if missing.
        mark: The length of the file; None to measure it by reading the file.
    """

    def __init__(self, path: Path, mark: LogMark | None = None) -> None:
        self.path = path
        make_folder(path.parent)
        is_new = not path.exists()
        self.mark = _cut_torn_line(path) if mark is None else mark
        """The end of the last complete record."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._is_torn = False
        if is_new:
            sync(path.parent)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Values are JSON values, or numpy scalars and arrays.

        Raises:
            OSError: the write failed. No part of the record is in the file.
            TypeError, ValueError, RecursionError: the record is not JSON.
        """
        line = (json.dumps(plain(record), allow_nan=False) + "\n").encode()
        if self._is_torn:
            self._cut_back()
        left = memoryview(line)
        try:
            while left:  # os.write may write only part of the line, for example if the disk is almost full
                left = left[os.write(self._descriptor, left) :]
        except BaseException:
            self._is_torn = True
            self._cut_back()
            raise
        self.mark = self.mark.after(line)

    def sync(self) -> LogMark:
        """Wait until all records are on disk. Returns the mark after the last record.

        Raises:
            OSError: the write failed.
        """
        sync_descriptor(self._descriptor)
        return self.mark

    def close(self) -> None:
        """Sync and close the file. May be called repeatedly."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut_back(self) -> None:
        """Remove the part of a record whose write failed. If this fails too, the next `write` tries again."""
        os.ftruncate(self._descriptor, self.mark.size)
        self._is_torn = False


class JsonlLog:
    """A log in one file of JSON lines. Takes the same arguments as `JsonlWriter`."""

    def __init__(self, path: Path, mark: LogMark | None = None) -> None:
        self.writer = JsonlWriter(path, mark)

    def close(self) -> None:
        self.writer.close()


def measure(path: Path, size: int | None = None) -> LogMark:
    """The mark at the end of a file, or after its first `size` bytes. A missing file counts as empty."""
    found, records, crc = 0, 0, 0
    if not path.exists():
        return LogMark()
    with path.open("rb") as file:
        while block := file.read(_BLOCK if size is None else min(_BLOCK, size - found)):
            found, records, crc = found + len(block), records + block.count(b"\n"), zlib.crc32(block, crc)
    return LogMark(size=found, records=records, crc32=crc)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a file. An incomplete last line is ignored, because its writer is at work or was killed.

    Raises:
        UsageError: there is no such file, or a line is not a JSON object.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}:{number}: expected a JSON object on each line ({error})") from None
            if not isinstance(record, dict):
                raise UsageError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
            yield record


def read_log(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Read the records of a run's log, without their format numbers.

    Args:
        path: The file.
        kind: The log's key in `FORMATS`.

    Raises:
        UsageError: as for `read_jsonl`.
        FormatError: a line has a different format number, or no format number.
    """
    for number, record in enumerate(read_jsonl(path), start=1):
        yield content_of(kind, record, f"{path}:{number}")


def refuse_other_log(path: Path) -> None:
    """Refuse to append to a log that a different version of Verbatim wrote. In a resumed run, damaged logs have already
    been replaced.

    Args:
        path: The log, whose name is a key in `FORMATS`.

    Raises:
        FormatError: the first line has a different format number, or no format number.
    """
    if first := next(read_jsonl(path), None) if path.is_file() else None:
        content_of(path.name, first, f"{path}:1")


def _cut_torn_line(path: Path) -> LogMark:
    """Cut a file after its last complete line. Returns the mark after that line."""
    mark = LogMark()
    if path.is_file():
        with path.open("rb") as lines:
            for line in lines:
                mark = mark.after(line) if line.endswith(b"\n") else mark
        if path.stat().st_size > mark.size:
            os.truncate(path, mark.size)
    return mark
