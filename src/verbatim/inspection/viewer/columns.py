"""Defines the index's columns, and makes them from fate files and from JSON lines.

A row of the index says what the table of trajectories shows, and where its record is: in the file of a step or in JSON
lines, and there at which row or byte.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verbatim.core.errors import UsageError
from verbatim.core.texts import cut
from verbatim.core.trajectories.openings import breaks
from verbatim.core.types import Trajectory, Turn
from verbatim.logs.fates.schema import SCHEMA, VERSION, VERSION_KEY

TRAIN, EVAL = "train", "eval"
_LONGEST_NAMES = 300
"""Characters of an environment's and a group's name in an address."""
LONGEST_ERROR = 300
"""Characters of an error that the index keeps."""

FATES, EVALUATED_LINES, TRAINED_LINES, EVALUATED_FATES = 0, 1, 2, 3
"""Where a record is: in a fate file of `trajectories/`, in an earlier version's `eval_trajectories.jsonl` or
`trajectories.jsonl`, or in a fate file of `evaluations/`."""
FOLDERS = {FATES: "trajectories", EVALUATED_FATES: "evaluations"}
"""The folders of fate files."""
LINE_FILES = {EVALUATED_LINES: "eval_trajectories.jsonl", TRAINED_LINES: "trajectories.jsonl"}
"""The files of JSON lines."""
KINDS = {FATES: TRAIN, TRAINED_LINES: TRAIN, EVALUATED_LINES: EVAL, EVALUATED_FATES: EVAL}
_LETTERS = {FATES: "", EVALUATED_LINES: "e", TRAINED_LINES: "o", EVALUATED_FATES: "v"}
"""Of a key."""
_KEY = re.compile(r"~([eov]?)(?:(\d{1,9})\.)?(\d{1,18})", re.ASCII)

_NAME = pa.dictionary(pa.int32(), pa.string())
COLUMNS = pa.schema([
    ("source", pa.int8()), ("file", pa.int32()), ("place", pa.int64()), ("kind", _NAME), ("step", pa.int32()),
    ("trajectory_id", pa.string()), ("env", _NAME), ("example_id", pa.string()), ("group_id", pa.string()),
    ("sample_index", pa.int32()), ("reward", pa.float64()), ("advantage", pa.float64()), ("reason", _NAME),
    ("flags", pa.list_(pa.string())), ("error", pa.string()), ("stop_reason", _NAME), ("truncated", pa.bool_()),
    ("num_turns", pa.int32()), ("num_sampled_tokens", pa.int64()), ("num_trained_tokens", pa.int64()),
    ("num_breaks", pa.int32()),
])  # fmt: skip
"""`place` is the row in the file of step `file`, or the byte in the JSON lines at which the record begins."""

_PLACES = ("source", "file", "place", "kind")
_STORED = [name for name in COLUMNS.names if name not in _PLACES]
SHOWN = [name for name in COLUMNS.names if name not in ("source", "file", "place")]
"""The columns that a row of the API has under the same names."""


@dataclass(frozen=True)
class Place:
    """Where a record is."""

    source: int
    file: int
    place: int

    @property
    def key(self) -> str:
        """As the API names it.

        >>> Place(FATES, 12, 5).key, Place(EVALUATED_FATES, 20, 5).key, Place(EVALUATED_LINES, 0, 1730).key
        ('~12.5', '~v20.5', '~e1730')
        """
        file = f"{self.file}." if self.source in FOLDERS else ""
        return f"~{_LETTERS[self.source]}{file}{self.place}"

    @classmethod
    def of(cls, key: str) -> Place | None:
        """The inverse of `key`; None for any other text."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        source = next(source for source, letter in _LETTERS.items() if letter == match[1])
        if (match[2] is not None) != (source in FOLDERS):
            return None
        file = int(match[2] or 0)
        return cls(source, file, int(match[3])) if file < 2**31 else None


def group_key(kind: str, env: str | None, step: int, group_id: str | None, key: str) -> str:
    """Names a group: ids of evaluated groups repeat with each evaluation, and with each environment. Where the names
    are too long for an address, the key of the row stands for its group."""
    if len(env or "") + len(group_id or "") > _LONGEST_NAMES:
        return key
    parts = [kind, env or "", step if kind == EVAL else 0, group_id or ""]
    return "~" + base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def group_of(key: str) -> tuple[str, str, int, str] | None:
    """The inverse of `group_key`: kind, environment, step (0 in training) and id; None for any other text."""
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


def read_columns(path: Path, step: int, source: int = FATES) -> pa.Table:
    """The index's rows of a fate file.

    Raises:
        UsageError: it is damaged, or no file of ours.
    """
    try:
        with pq.ParquetFile(path) as file:
            found = (file.schema_arrow.metadata or {}).get(VERSION_KEY)
            if found != VERSION:
                raise UsageError(f"{path.name} holds no trajectories that this version of Verbatim reads")
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
        return _located(columns, source, step, np.arange(table.num_rows))
    except (pa.ArrowException, AttributeError, IndexError, KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path.name} has other columns than trajectories of ours: {cut(str(error), 200)}") from error


def _with_plain_flags(group: pa.Table) -> pa.Table:
    """A row group whose flags are lists of texts: pyarrow joins no lists of dictionaries of several groups."""
    flags = group.column("flags").combine_chunks()
    plain = pa.ListArray.from_arrays(flags.offsets, pc.cast(flags.values, pa.string()))
    return group.set_column(group.schema.get_field_index("flags"), "flags", plain)


def from_records(records: Sequence[tuple[int, Mapping[str, Any]]], source: int) -> pa.Table:
    """The index's rows of JSON lines: each with the byte at which its line begins, as `line_columns` has them."""
    columns = {
        name: pa.array([record.get(name) for _, record in records], COLUMNS.field(name).type) for name in _STORED
    }
    places = np.array([place for place, _ in records], dtype=np.int64)
    return _located(columns, source, 0, places)


def _located(columns: Mapping[str, Any], source: int, file: int, places: Any) -> pa.Table:
    count = len(places)
    where = {
        "source": pa.array(np.full(count, source, np.int8)),
        "file": pa.array(np.full(count, file, np.int32)),
        "place": pa.array(places, pa.int64()),
        "kind": pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), [KINDS[source]]),
    }
    all_columns = {**columns, **where}
    return pa.Table.from_arrays([all_columns[field.name].cast(field.type) for field in COLUMNS], schema=COLUMNS)


def line_columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """The index's columns of a line `{"step": ..., "trajectory": ...}`, worked out without putting prompts together.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such line.
    """
    record, step = line["trajectory"], line["step"]
    turns = record["turns"]
    sampled = sum(len(turn["completion_ids"]) for turn in turns) + record.get("num_unrecorded_tokens", 0)
    error = record["error"]
    return {
        "step": int(step),
        "trajectory_id": _text(record["trajectory_id"]),
        "env": _text(record["env"]),
        "example_id": _text(record["example_id"]),
        "group_id": _text(record["group_id"]),
        "sample_index": int(record["sample_index"]),
        "reward": _number(record["reward"]),
        "advantage": _number(record["advantage"]),
        "reason": None,
        "flags": [],
        "error": None if error is None else _text(error)[:LONGEST_ERROR],
        "stop_reason": record["stop_reason"],
        "truncated": bool(record["truncated"]),
        "num_turns": len(turns),
        "num_sampled_tokens": sampled,
        "num_breaks": num_breaks(turns),
    }


def num_breaks(turns: Sequence[Mapping[str, Any]]) -> int:
    """The turns that break. One that extends the turn before is stored as all of that turn's context, and what is new:
    only where one does not, prompts are put together.

    >>> first = {"prompt": {"of_turn": None, "shared": 0, "new_ids": [1, 2]}, "completion_ids": [3], "agent": "main"}
    >>> second = {"prompt": {"of_turn": 0, "shared": 2, "new_ids": [9]}, "completion_ids": [4], "agent": "main"}
    >>> num_breaks([first, second])
    1
    """
    context = 0
    for index, turn in enumerate(turns):
        prompt = turn["prompt"]
        if index and not (prompt["of_turn"] == index - 1 and prompt["shared"] == context):
            return len(breaks(_read(turns)))
        context = prompt["shared"] + len(prompt["new_ids"]) + len(turn["completion_ids"])
    return 0


def _read(turns: Sequence[Mapping[str, Any]]) -> Sequence[Turn]:
    """Their ids and agents, as a trajectory has them."""
    contexts: list[list[int]] = []
    read = []
    for turn in turns:
        prompt = turn["prompt"]
        known = [] if prompt["of_turn"] is None else contexts[prompt["of_turn"]][: prompt["shared"]]
        ids = [*known, *prompt["new_ids"]]
        contexts.append([*ids, *turn["completion_ids"]])
        read.append(Turn(prompt_ids=ids, completion_ids=turn["completion_ids"], agent=_text(turn.get("agent", "main"))))
    return Trajectory(example_id="", turns=tuple(read)).turns


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(value: Any) -> str:
    """Without lone surrogates, which Arrow does not store."""
    return str(value).encode("utf-8", "backslashreplace").decode()
