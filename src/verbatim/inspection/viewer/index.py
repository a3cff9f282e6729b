"""Indexes the trajectories of a run folder, and keeps the index up to date while the run continues.

The figures of all trajectories are in one Arrow table in memory, about 200 bytes per trajectory; tokens and texts stay
on disk. The files of the newest steps are read first, so that the page has something to show while a long run is
indexed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from verbatim.core.disk import is_inside
from verbatim.core.errors import UsageError
from verbatim.inspection.viewer.columns import COLUMNS, FOLDERS, read_columns
from verbatim.logs.outcomes.files import files_in

_PUBLISH_SECONDS = 0.25
"""Seconds between two updates of the snapshot while a folder is being indexed."""
_PROBLEMS = 50
"""Maximum number of problems to list."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of the index at one time."""

    table: pa.Table
    """One row per trajectory, in no particular order, with the columns `COLUMNS`."""
    version: int = 0
    """A number that increases with each change."""
    generation: int = 0
    """A number that increases when indexed rows have become invalid because the run was resumed from an earlier
    step."""
    indexed: float = 0.0
    """Share of the folder's bytes that have been read; 1 when the index is complete."""
    problems: tuple[str, ...] = ()
    """A sentence for each file that cannot be read."""


_Mark = tuple[int, int, int]
_File = tuple[int, int]
"""Source and step of an outcome file."""


@dataclass(eq=False)
class RunIndex:
    """The index of one run folder. Only one thread may call `refresh`; any thread may read `snapshot`."""

    folder: Path
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(COLUMNS.empty_table()))
    _files: dict[_File, _Mark] = field(default_factory=dict)
    """The outcome files in the table, with the modification time, size and inode that each had when it was read."""
    _bad: dict[_File, tuple[_Mark, str]] = field(default_factory=dict)
    """The outcome files that cannot be read, each with the reason."""
    _new: list[pa.Table] = field(default_factory=list)
    _gone: list[_File] = field(default_factory=list)
    """The files whose rows must be removed from the table."""
    _rewritten: bool = False
    _read: int = 0
    _left: int = 0
    _published: float = 0.0

    def refresh(self, stop: threading.Event | None = None) -> None:
        """Read new files, and remove the rows of files that no longer exist. While files are being read, a snapshot of
        the rows read so far is published every `_PUBLISH_SECONDS`."""
        self._rewritten, self._read = False, 0
        self._published = time.monotonic()
        new = self._new_files()
        self._left = sum(mark[1] for _, _, mark in new)
        for file, path, mark in new:
            try:
                self._new.append(read_columns(path, file[1], file[0]))
                self._files[file] = mark
            except UsageError as error:
                self._bad[file] = (mark, f"{path.parent.name}/{error}")
            self._read, self._left = self._read + mark[1], self._left - mark[1]
            if stop is not None and stop.is_set():
                return
            if time.monotonic() - self._published > _PUBLISH_SECONDS:
                self._publish()
        self._left = 0
        self._publish()

    def _new_files(self) -> list[tuple[_File, Path, _Mark]]:
        """The outcome files that are new, or that have changed since they were read, the newest first."""
        found: dict[_File, tuple[Path, _Mark]] = {}
        linked: dict[_File, tuple[_Mark, str]] = {}
        oldest: dict[int, int] = {}
        for source, name in FOLDERS.items():
            for step, path in files_in(self.folder / name).items():
                if not is_inside(self.folder, path):  # a link may lead out of the run folder
                    why = f"{name}/{path.name} is reached by a link, which is not followed"
                    linked[source, step] = ((0, 0, 0), why)
                    continue
                with contextlib.suppress(FileNotFoundError):  # retention or a resume has removed it since
                    stat = path.stat()
                    found[source, step] = (path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
                    oldest.setdefault(source, step)
        gone = [file for file, mark in self._files.items() if found.get(file, (None, None))[1] != mark]
        self._rewritten |= any(step >= oldest.get(source, 0) for source, step in gone)
        for file in gone:
            del self._files[file]
            self._gone.append(file)
        self._bad = {file: bad for file, bad in self._bad.items() if file in found and found[file][1] == bad[0]}
        self._bad |= linked
        fresh = [file for file in found if file not in self._files and file not in self._bad]
        return [(file, *found[file]) for file in sorted(fresh, key=lambda file: file[1], reverse=True)]

    def _publish(self) -> None:
        before = self.snapshot
        self._published = time.monotonic()
        problems = [why for _, (_, why) in sorted(self._bad.items())]
        more = len(problems) - _PROBLEMS
        if more > 0:
            problems = [*problems[:_PROBLEMS], f"and {more:,} more"]
        changed = bool(self._new or self._gone)
        indexed = 1.0 if not self._left else self._read / max(1, self._read + self._left)
        if not changed and indexed == before.indexed and tuple(problems) == before.problems:
            return
        self.snapshot = Snapshot(
            table=self._merged(before.table) if changed else before.table,
            version=before.version + 1,
            generation=before.generation + int(self._rewritten and bool(self._gone)),
            indexed=indexed,
            problems=tuple(problems),
        )
        self._new, self._gone = [], []

    def _merged(self, table: pa.Table) -> pa.Table:
        if self._gone:
            sources, files = np.asarray(table.column("source")), np.asarray(table.column("file"))
            kept = np.ones(len(sources), dtype=bool)
            for source, file in self._gone:
                kept &= ~((sources == source) & (files == file))
            table = table.filter(pa.array(kept))
        merged: pa.Table = pa.concat_tables([table, *self._new]).unify_dictionaries().combine_chunks()
        return merged
