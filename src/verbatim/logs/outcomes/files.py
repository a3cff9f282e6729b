"""Writes outcomes into a folder, one immutable Parquet file per step, and reads them back.

```
trajectories/
    step-000001.parquet     the trajectories of the batch that step 1 trained, and those dropped before it
    step-000002.parquet
evaluations/
    step-000000.parquet     the episodes of the evaluation before the first step
```
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verbatim.core.disk import is_inside, keep_aside, make_folder, refuse_link, replacing
from verbatim.core.errors import UsageError
from verbatim.core.formats import METADATA_KEY, check_metadata
from verbatim.core.texts import cut, ranges
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.outcomes.retention import EVERYTHING, Retention
from verbatim.logs.outcomes.schema import KIND, SCHEMA
from verbatim.logs.outcomes.table import from_table, records_of, to_table

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ROWS = 512
"""Maximum number of rows in a row group. To show one trajectory, its whole row group has to be read. Each row group
adds 10 KB to the file, so smaller row groups would waste space."""
_ROW_GROUP_BYTES = 4 * 2**20
"""Approximate maximum size of a row group in memory."""
_SLICE_TOKENS = 2**19
"""Number of sampled tokens after which an in-memory table is written. This limits the memory that writing needs; the
next table reuses this memory."""
_KEPT_IDS_OF_TOKEN = 64
"""This number of ids in kept sets counts as one sampled token for `_SLICE_TOKENS`."""
_PART = 2**20
"""Number of bytes to read from a file at a time."""
_NAME = re.compile(r"step-(\d{6,})\.parquet")
_NUMBERS = [
    *(
        f"turns.list.element.{name}.list.element"
        for name in (
            "prompt_new_ids",
            "completion_ids",
            "logprobs",
            "trainer_logprobs",
            "gradients",
            "teacher_logprobs",
        )
    ),
    *(f"turns.list.element.seconds_{part}" for part in ("queued", "generated", "tools")),
]
"""Columns whose numbers rarely repeat, so that a dictionary would not help. Instead, their bytes are grouped by
position, which compresses better."""
_KEPT = "turns.list.element.kept_sets.list.element.list.element"
"""The column of kept sets. Their ids are ascending, so they are stored as differences."""
_ENCODINGS = {**dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"), _KEPT: "DELTA_BINARY_PACKED"}


@functools.cache
def _leaves() -> list[str]:
    """The names that Parquet gives to the leaf columns of `SCHEMA`."""
    empty = pa.BufferOutputStream()
    pq.write_table(SCHEMA.empty_table(), empty)
    columns = pq.ParquetFile(empty.getvalue()).schema
    return [columns.column(index).path for index in range(len(columns))]


@dataclass(frozen=True, kw_only=True)
class FileMark:
    """Size and checksum of a file when it was written, to detect damage."""

    size: int
    """Size in bytes."""
    crc32: int
    """CRC-32 of the content."""


@dataclass(eq=False)
class OutcomeFolder:
    """A run's outcome files in one folder. Only one process may write these files."""

    path: Path
    """The folder. It is created on the first write."""
    retention: Retention = EVERYTHING
    """The rules for which groups are written and which files are kept."""
    files: dict[int, FileMark] = field(default_factory=dict)
    """Marks of the files that are kept, by step."""
    num_incomplete: int = 0
    """Number of trajectories that were written without messages and info, because these are not JSON."""

    def write(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Write the file of a step, then remove the old files that `retention` does not keep.

        Raises:
            OSError: the write failed. There is no file for this step.
        """
        kept = [outcome for outcome in outcomes if self.retention.keeps(outcome.trajectory.group_id)]
        make_folder(self.path)
        with replacing(self.path / f"step-{step:06d}.parquet") as path:
            self.num_incomplete += _write(path, step, kept)
            mark = _mark_of(path)
        self.files[step] = mark
        self._retire()

    def marks(self) -> dict[str, dict[str, int]]:
        """The files' marks by step, as plain JSON values for a checkpoint."""
        return {str(step): dataclasses.asdict(mark) for step, mark in self.files.items()}

    def restore(self, step: int, marks: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Return to a checkpoint: remove the files of later steps, which will be done again.

        Damaged files are renamed, and moved out of the folder to a place next to it.

        Args:
            step: The checkpoint's step; 0 removes all files.
            marks: The return value of `marks` at the checkpoint.

        Returns:
            A sentence for each damaged file, and one sentence for all missing files.

        Raises:
            FormatError: a different version of Verbatim wrote the files.
        """
        found = files_in(self.path)
        for later in [number for number in found if number > step or step == 0]:
            _remove(found.pop(later))
        faults: list[str] = []
        missing: list[int] = []
        oldest = min(found, default=step + 1)
        self.files = {}
        for number, mark in sorted((int(name), FileMark(**mark)) for name, mark in marks.items()):
            path = found.get(number)
            if path is None:
                # Files before the oldest one may have been removed by `_retire` after the checkpoint.
                if number > oldest or self.retention == EVERYTHING:
                    missing.append(number)
            elif _mark(path) == mark:
                self.files[number] = mark
            else:
                # The file must leave the folder, because libraries such as pandas read all files in a folder.
                aside = keep_aside(path, self.path.parent)
                faults.append(f"{path} is damaged: its content is not what was written. It is kept as {aside}")
        if self.files:  # one version wrote all files, so check only the newest
            with pq.ParquetFile(found[max(self.files)]) as newest:
                refuse_other_columns(newest, found[max(self.files)])
        if missing:
            name = "file of step" if len(missing) == 1 else "files of steps"
            faults.append(f"{self.path}: the {name} {ranges(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        return faults

    def _retire(self) -> None:
        keep, total = self.retention, sum(mark.size for mark in self.files.values())
        for step in sorted(self.files)[:-1]:  # the newest file is always kept
            too_many = keep.steps is not None and len(self.files) > keep.steps
            if not too_many and (keep.size is None or total <= keep.size):
                return
            total -= self.files.pop(step).size
            _remove(self.path / f"step-{step:06d}.parquet")


def files_in(folder: Path) -> dict[int, Path]:
    """The files of a folder by step, ascending; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def own_files_in(folder: Path) -> dict[int, Path]:
    """Like `files_in`, but for an untrusted run folder, in which a link could lead to other files of the user who reads
    it.

    Raises:
        UsageError: the folder or a file is a link, or a file is not a regular file.
    """
    refuse_link(folder)
    return {step: _own(folder, path) for step, path in files_in(folder).items()}


def _own(folder: Path, path: Path) -> Path:
    refuse_link(path)
    if not is_inside(folder, path):
        raise UsageError(f"{path} is not a regular file, so it is not read")
    return path


def read_outcomes(path: Path) -> Iterator[tuple[int, TrajectoryOutcome]]:
    """Read the outcomes in a file, or in all files of a folder in the order of steps, each with its step.

    Raises:
        UsageError: there are no files, a file is a link, or a file is damaged or was not written by `OutcomeFolder`.
    """
    files = [_own(path, file) for file in files_in(path).values()] if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UsageError(f"{path} has no trajectories; expected a folder with files such as step-000001.parquet")
    for file in files:
        yield from _read(file, lambda batch: zip(_steps(batch), from_table(batch), strict=True))


_UNREADABLE = (
    pa.ArrowException,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    AssertionError,
)
"""Exceptions that reading an untrusted or damaged file may raise."""


def read_records(file: Path) -> Iterator[Mapping[str, Any]]:
    """Read the trajectories in a file, in the form that `trajectory_from_json` accepts, without reconstructing prompts.

    Raises:
        UsageError: as for `read_outcomes`.
    """
    return _read(file, lambda batch: (stored.record for stored in records_of(batch)))


def _read(file: Path, rows: Callable[[pa.RecordBatch], Iterable[T]]) -> Iterator[T]:
    """Yield the results of `rows` for a file, which is read in batches of rows."""
    try:
        with pq.ParquetFile(file) as opened:
            refuse_other_columns(opened, file)
            # Row groups are read one by one, because a batch that spans two row groups cannot have nested columns.
            for group in range(opened.num_row_groups):
                for batch in opened.iter_batches(_ROWS, row_groups=[group]):
                    yield from rows(batch)
    except _UNREADABLE as error:
        if isinstance(error, UsageError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{file} cannot be read as a file of Verbatim's trajectories ({why})") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_other_columns(file: pq.ParquetFile, where: object) -> None:
    """Refuse a file that does not contain outcomes.

    Raises:
        FormatError: the file has a different format number, or no format number.
        UsageError: the file has different columns.
    """
    check_metadata(KIND, (file.schema_arrow.metadata or {}).get(METADATA_KEY.encode()), where)
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        there = file.schema_arrow.field(name).type if name in file.schema_arrow.names else None
        if there is None or there.id != kind.id:
            raise UsageError(f"{where} is damaged: its column {name} is {cut(str(there or 'missing'), 100)}")


def _steps(batch: pa.RecordBatch) -> list[int]:
    steps: list[int] = batch.column("step").to_pylist()
    if None in steps:
        raise ValueError("a step is missing")
    return steps


def _write(path: Path, step: int, outcomes: Sequence[TrajectoryOutcome]) -> int:
    """Write a file. Returns the number of trajectories that were written without messages and info."""
    num_incomplete = 0
    with (
        pa.OSFile(str(path), "wb") as sink,
        pq.ParquetWriter(
            sink,
            SCHEMA,
            compression="zstd",
            use_dictionary=[name for name in _leaves() if name not in _ENCODINGS],
            column_encoding=_ENCODINGS,
            write_statistics=[name for name in _leaves() if "." not in name],
        ) as writer,
    ):
        for own in _slices(outcomes):
            table, num_cut = to_table(step, own)
            num_incomplete += num_cut
            for start, end in row_groups(weights(table)):
                writer.write_table(table.slice(start, end - start), row_group_size=_ROWS)
    return num_incomplete


def _slices(outcomes: Sequence[TrajectoryOutcome]) -> Iterator[Sequence[TrajectoryOutcome]]:
    """Split outcomes into parts of `_ROWS` outcomes, or fewer if the outcomes are long. Each part becomes one table. If
    there are no outcomes, there is one empty part, so that the file is still written."""
    start, total = 0, 0
    for place, outcome in enumerate(outcomes):
        if place - start == _ROWS or total > _SLICE_TOKENS:
            yield outcomes[start:place]
            start, total = place, 0
        kept = sum(len(turn.kept_sets.ids) for turn in outcome.trajectory.turns if turn.kept_sets is not None)
        total += outcome.trajectory.num_sampled_tokens + kept // _KEPT_IDS_OF_TOKEN
    yield outcomes[start:]


def weights(table: pa.Table) -> list[int]:
    """Approximate size of each row in memory in bytes, counting its tokens and texts."""
    texts = sum(
        np.asarray(pc.fill_null(pc.binary_length(table.column(name)), 0)) for name in ("messages", "tools", "info")
    )
    turns = table.column("turns").combine_chunks()
    first = np.asarray(turns.offsets)
    in_turns = np.zeros(len(turns.values) + 1, dtype=np.int64)
    # Bytes per token: a prompt id is an int32, and a sampled token has five columns of 4 bytes.
    for name, size in (("prompt_new_ids", 4), ("completion_ids", 20)):
        in_turns[1:] += size * np.diff(np.asarray(turns.values.field(name).offsets))
    kept = turns.values.field("kept_sets")
    in_turns[1:] += 4 * np.diff(np.asarray(kept.values.offsets)[np.asarray(kept.offsets)])
    experts, calls = turns.values.field("routed_experts"), turns.values.field("tool_calls")
    in_turns[1:] += sum(np.asarray(pc.fill_null(pc.binary_length(column), 0)) for column in (experts, calls))
    ends = np.cumsum(in_turns)
    found: list[int] = (texts + ends[first[1:]] - ends[first[:-1]]).tolist()
    return found


def row_groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split rows into row groups (start, end) of at most `_ROWS` rows and about `_ROW_GROUP_BYTES` bytes.

    >>> list(row_groups([10, 10, 9_000_000, 10, 10]))
    [(0, 2), (2, 3), (3, 5)]
    """
    start, total = 0, 0
    for row, size in enumerate(sizes):
        if row > start and (row - start == _ROWS or total + size > _ROW_GROUP_BYTES):
            yield start, row
            start, total = row, 0
        total += size
    if start < len(sizes) or not sizes:
        yield start, len(sizes)


def _mark(path: Path) -> FileMark | None:
    """The mark of a file; None if the file cannot be read."""
    try:
        return _mark_of(path)
    except OSError:
        return None


def _mark_of(path: Path) -> FileMark:
    size, crc32 = 0, 0
    with path.open("rb") as file:
        while part := file.read(_PART):
            size, crc32 = size + len(part), zlib.crc32(part, crc32)
    return FileMark(size=size, crc32=crc32)
