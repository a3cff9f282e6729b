"""Defines the JSON lines file from which a repeated command (`verbatim eval`, `verbatim rollout`) continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.disk import rename, sync_descriptor, temporary_beside
from verbatim.core.errors import FormatError, UsageError
from verbatim.core.formats import LINES, content_of, stamped
from verbatim.logs.checkpoints.lock import FolderLock
from verbatim.logs.monitors.jsonl import JsonlWriter

_BEGINNING = json.dumps(stamped(LINES, {"step": 0})).removesuffix("0}")
"""The beginning of each line. A torn last line is removed only if it begins with this text, so that other files are
left alone."""


class KeptLines:
    """The file from which a repeated command continues. Only one process at a time may open the file. Opening the file
    removes a torn last line and the records of failures, so that the tasks of the removed records are done again.

    Args:
        path: The file, created if missing.
        what: What a line holds, for messages: "an episode of verbatim eval".
        take_in: Called with each record in the file; returns True if the record is a failure.

    Raises:
        FormatError: the file has a different version of the format.
        UsageError: another process is writing the file, or the file contains something else.
    """

    def __init__(self, path: Path, *, what: str, take_in: Callable[[Mapping[str, Any]], bool]) -> None:
        self.path = path
        self.num_failed = 0
        """Number of failures removed from the file."""
        self._what, self._take_in = what, take_in
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FolderLock(path.parent, f".{path.name}.lock")
        except UsageError:
            raise UsageError(
                f"{path} is being written by another process; wait for it to end, or name another --out file"
            ) from None
        try:
            if path.exists():
                self._take_over()
            self.writer = JsonlWriter(path)
        except BaseException:
            self._lock.release()
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, whose first key must be `step`. Raises the same errors as `JsonlWriter.write`."""
        self.writer.write(stamped(LINES, record))

    def close(self, *, keeps_empty: bool = True) -> None:
        """Close the file, and release it to other processes.

        Args:
            keeps_empty: False to delete the file if it has no line.
        """
        self.writer.close()
        if not keeps_empty and self.writer.mark.size == 0:
            self.path.unlink(missing_ok=True)
        self._lock.release()

    def _take_over(self) -> None:
        """Read the existing records. If some are failures, rewrite the file without them."""
        rewritten = temporary_beside(self.path)
        try:
            with self.path.open(encoding="utf-8") as old, rewritten.open("w", encoding="utf-8") as new:
                for number, line in enumerate(old, start=1):
                    if not line.endswith("\n"):
                        if not line.startswith(_BEGINNING[: len(line)]):
                            raise self._none_of_ours(number)
                    elif self._has_failed(line, number):
                        self.num_failed += 1
                    else:
                        new.write(line)
                new.flush()
                sync_descriptor(new.fileno())
            if self.num_failed:
                rename(rewritten, self.path)
        finally:
            rewritten.unlink(missing_ok=True)

    def _has_failed(self, line: str, number: int) -> bool:
        """Pass a line's record to `take_in`, and return the result of `take_in`. A line of a different kind is
        refused."""
        try:
            return self._take_in(content_of(LINES, json.loads(line), f"{self.path}:{number}"))
        except UsageError as error:
            if isinstance(error, FormatError) and error.number is None:
                raise self._none_of_ours(number) from None
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise self._none_of_ours(number) from None

    def _none_of_ours(self, number: int) -> UsageError:
        return UsageError(f"{self.path}:{number}: not {self._what}; name another --out file")
