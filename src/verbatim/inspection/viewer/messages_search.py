"""Searches the messages of a run's trajectories for a string, one file at a time, on a thread."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verbatim.inspection.viewer.columns import FOLDERS
from verbatim.inspection.viewer.index import Snapshot

_KEPT = 4
"""Maximum number of searches to keep; older searches are cancelled."""
Hits = set[tuple[int, int, int]]
"""The locations (source, file, place) of the trajectories that were found."""


@dataclass(eq=False)
class _Search:
    text: str
    hits: Hits = field(default_factory=set)
    done: set[tuple[int, int]] = field(default_factory=set)
    """The searched files, as (source, step)."""
    version: int = -1
    """The version of the last snapshot that was searched completely."""
    given_up: bool = False


class MessageSearch:
    """The searches of one run. Searches run in the background; `found` starts a search, or returns the results so far
    of a search that was started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._searches: OrderedDict[str, _Search] = OrderedDict()
        self._generation = -1
        self._wanted = threading.Condition()
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._closed = False

    def found(self, snapshot: Snapshot, text: str) -> tuple[NDArray[np.bool_], bool]:
        """Return (1) a mask of the rows whose messages were found to contain the text, and (2) True if the search is
        still running."""
        with self._wanted:
            if snapshot.generation != self._generation:
                self._give_up_all()
                self._generation = snapshot.generation
            search = self._searches.pop(text, None) or _Search(text)
            self._searches[text] = search
            while len(self._searches) > _KEPT:
                self._searches.popitem(last=False)[1].given_up = True
            self._snapshot = snapshot
            pending = search.version != snapshot.version
            if pending and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="message-search", daemon=True)
                self._thread.start()
            self._wanted.notify_all()
            hits = list(search.hits)
        return _rows_of(snapshot.table, hits), pending

    def close(self) -> None:
        """Tell the thread to end. It ends after the row group that it is reading."""
        with self._wanted:
            self._closed = True
            self._give_up_all()
            self._wanted.notify_all()

    def _give_up_all(self) -> None:
        for search in self._searches.values():
            search.given_up = True
        self._searches.clear()

    def _work(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                search, snapshot = self._next(), self._snapshot
            assert search is not None and snapshot is not None
            for file, hits in self._scan(search, snapshot):
                with self._wanted:
                    if search.given_up:
                        break
                    search.hits |= hits
                    search.done.add(file)
            else:
                # No lock is needed, because only this thread writes `version`, and a search that was given up is not
                # read again.
                search.version = snapshot.version

    def _next(self) -> _Search | None:
        """The unfinished search that was requested last."""
        version = -1 if self._snapshot is None else self._snapshot.version
        return next((s for s in reversed(self._searches.values()) if s.version != version), None)

    def _scan(self, search: _Search, snapshot: Snapshot) -> Iterator[tuple[tuple[int, int], Hits]]:
        """Yield ((source, step), hits) for each file that has not been searched yet, the newest first."""
        # The text is escaped in the same way as in the column, which contains JSON.
        needle = json.dumps(search.text)[1:-1]
        sources, files = (np.asarray(snapshot.table.column(name)) for name in ("source", "file"))
        for source, name in FOLDERS.items():
            for file in np.unique(files[sources == source])[::-1].tolist():
                if (source, file) not in search.done:
                    path = self._folder / name / f"step-{file:06d}.parquet"
                    yield (source, file), {(source, file, row) for row in _rows_in_file(path, needle, search)}


def _rows_of(table: pa.Table, hits: list[tuple[int, int, int]]) -> NDArray[np.bool_]:
    kinds = [("source", np.int8), ("file", np.int32), ("place", np.int64)]
    rows = np.empty(table.num_rows, dtype=kinds)
    for name, _ in kinds:
        rows[name] = np.asarray(table.column(name))
    return np.isin(rows, np.array(hits, dtype=kinds))


def _rows_in_file(path: Path, needle: str, search: _Search) -> list[int]:
    """The rows whose messages contain `needle` in their JSON text. Unreadable files are skipped here, because the index
    reports them."""
    found: list[int] = []
    try:
        with pq.ParquetFile(path) as file:
            first = 0
            for group in range(file.num_row_groups):
                if search.given_up:
                    return found
                column = file.read_row_group(group, columns=["messages"], use_threads=False).column(0)
                hits = np.asarray(pc.match_substring(column, needle, ignore_case=True))
                found += (np.flatnonzero(hits) + first).tolist()
                first += len(column)
    # For a file that is damaged or has different columns, pyarrow may raise any of these exceptions.
    except (pa.ArrowException, OSError, AttributeError, ValueError, KeyError, TypeError):
        pass
    return found
