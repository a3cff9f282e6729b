"""Defines the columns of the index and reads them from outcome files.

A row of the index contains what the page's table of trajectories shows, and the location of the trajectory's record:
the file of a step, and a row in that file.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verbatim.core.errors import UsageError
from verbatim.core.texts import cut
from verbatim.logs.outcomes.files import refuse_other_columns
from verbatim.logs.outcomes.schema import SCHEMA

TRAIN, EVAL = "train", "eval"
_LONGEST_NAMES = 300
"""Maximum total length of the names of an environment and a group in an address, in characters."""
LONGEST_ERROR = 300
"""Maximum length of an error message in the index, in characters."""

OUTCOMES, EVALUATED_OUTCOMES = 0, 1
"""The two sources of records: the outcome files in `trajectories/`, and the outcome files in `evaluations/`."""
FOLDERS = {OUTCOMES: "trajectories", EVALUATED_OUTCOMES: "evaluations"}
"""For each source, the folder with its outcome files."""
KINDS = {OUTCOMES: TRAIN, EVALUATED_OUTCOMES: EVAL}
_KEY = re.compile(r"~(v?)(\d{1,9})\.(\d{1,18})", re.ASCII)

_NAME = pa.dictionary(pa.int32(), pa.string())
COLUMNS = pa.schema([
    ("source", pa.int8()), ("file", pa.int32()), ("place", pa.int64()), ("kind", _NAME), ("step", pa.int32()),
    ("trajectory_id", pa.string()), ("env", _NAME), ("example_id", pa.string()), ("group_id", pa.string()),
    ("sample_index", pa.int32()), ("reward", pa.float64()), ("advantage", pa.float64()), ("reason", _NAME),
    ("flags", pa.list_(pa.string())), ("error", pa.string()), ("stop_reason", _NAME), ("truncated", pa.bool_()),
    ("num_turns", pa.int32()), ("num_sampled_tokens", pa.int64()), ("num_trained_tokens", pa.int64()),
    ("num_breaks", pa.int32()),
])  # fmt: skip
"""The columns of the index. `file` is the step whose file contains the record, and `place` is the record's row in that
file."""

_PLACES = ("source", "file", "place", "kind")
_STORED = [name for name in COLUMNS.names if name not in _PLACES]
SHOWN = [name for name in COLUMNS.names if name not in ("source", "file", "place")]
"""The columns that the rows in the API's answers have too, under the same names."""


@dataclass(frozen=True)
class RecordLocation:
    """The location of a trajectory's record."""

    source: int
    file: int
    place: int

    @property
    def key(self) -> str:
        """The name of the location in the API.

        >>> RecordLocation(OUTCOMES, 12, 5).key, RecordLocation(EVALUATED_OUTCOMES, 20, 5).key
        ('~12.5', '~v20.5')
        """
        return f"~{'v' * self.source}{self.file}.{self.place}"

    @classmethod
    def of(cls, key: str) -> RecordLocation | None:
        """The location for a name returned by `key`; None for any other string."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        return cls(len(match[1]), int(match[2]), int(match[3]))


def group_key(kind: str, env: str | None, step: int, group_id: str | None, key: str) -> str:
    """The name of a group in the API.

    Evaluated groups have the same ids in each evaluation and environment, so the name includes the step and the
    environment. If the names are too long for an address, the row's `key` is also the name of its group.
    """
    if len(env or "") + len(group_id or "") > _LONGEST_NAMES:
        return key
    parts = [kind, env or "", step if kind == EVAL else 0, group_id or ""]
    return "~" + base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def group_of(key: str) -> tuple[str, str, int, str] | None:
    """Kind, environment, step (0 for training) and id of the group with a name returned by `group_key`; None for any
    other string."""
    if not key.startswith("~"):
        return None
    try:
        kind, env, step, group_id = json.loads(base64.urlsafe_b64decode(key[1:] + "=" * (-len(key[1:]) % 4)))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (kind, env, group_id)
    if type(step) is not int or not all(isinstance(text, str) and text == _text(text) for text in texts):
        return None
    return kind, env, step, group_id


def read_columns(path: Path, step: int, source: int = OUTCOMES) -> pa.Table:
    """Read the index rows of an outcome file.

    Raises:
        UsageError: the file is damaged, or is not an outcome file.
    """
    try:
        with pq.ParquetFile(path) as file:
            refuse_other_columns(file, path.name)
            groups = [
                file.read_row_group(group, columns=_STORED, use_threads=False) for group in range(file.num_row_groups)
            ]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path.name} cannot be read: {cut(str(error), 200)}") from error
    try:
        groups = groups or [SCHEMA.empty_table().select(_STORED)]
        table = pa.concat_tables([_with_plain_flags(group) for group in groups])
        columns = {name: table.column(name).combine_chunks() for name in _STORED}
        columns["error"] = pc.utf8_slice_codeunits(columns["error"], 0, LONGEST_ERROR)
        count = table.num_rows
        columns |= {
            "source": pa.array(np.full(count, source, np.int8)),
            "file": pa.array(np.full(count, step, np.int32)),
            "place": pa.array(np.arange(count), pa.int64()),
            "kind": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), [KINDS[source]]),
        }
        return pa.Table.from_arrays([columns[field.name].cast(field.type) for field in COLUMNS], schema=COLUMNS)
    except (pa.ArrowException, AttributeError, IndexError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path.name} does not have the columns of trajectories: {cut(str(error), 200)}") from error


def _with_plain_flags(group: pa.Table) -> pa.Table:
    """Convert the flags of a row group to lists of plain strings, because pyarrow cannot concatenate lists of
    dictionary-encoded strings."""
    flags = group.column("flags").combine_chunks()
    plain = pa.ListArray.from_arrays(flags.offsets, pc.cast(flags.values, pa.string()))
    return group.set_column(group.schema.get_field_index("flags"), "flags", plain)


def _text(value: Any) -> str:
    """Escape lone surrogates in the text of a value, because Arrow cannot store them."""
    return str(value).encode("utf-8", "backslashreplace").decode()
