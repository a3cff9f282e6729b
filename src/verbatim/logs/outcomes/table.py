"""Converts outcomes to rows of a table and back, bit for bit."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from verbatim.core.texts import error_text
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.trajectory_json import NOT_WRITTEN, plain, prompt_to_json, trajectory_from_json
from verbatim.core.types import Experts, KeptSets, Turn
from verbatim.logs.outcomes.schema import NAME, SCHEMA, TURN

_NUMBERS = ("reward_parts", "agent_rewards")
"""Columns that contain numbers by name."""
_OF_ROW = (
    "step",
    "reason",
    "flags",
    "unrecorded",
    "num_turns",
    "num_trained_tokens",
    "num_sampled_tokens",
    "num_breaks",
)
"""Columns that are not fields of a trajectory."""
_SAME = (*_OF_ROW, "messages", "tools", "info", "turns", *_NUMBERS)
"""Columns that are not simply copied from the trajectory's field of the same name."""


def to_table(step: int, outcomes: Sequence[TrajectoryOutcome]) -> tuple[pa.Table, int]:
    """Convert outcomes to a table.

    Returns:
        (1) A table with one row per outcome, in order, and the columns of `SCHEMA`. (2) The number of outcomes whose
        messages, tools or info are not JSON. For these outcomes all three are left out, and `info` has only the reason,
        under `NOT_WRITTEN`.
    """
    records = [outcome.trajectory for outcome in outcomes]
    texts = [_texts(record) for record in records]
    columns: dict[str, Any] = {
        name: [getattr(record, name) for record in records] for name in SCHEMA.names if name not in _SAME
    }
    columns |= {
        "step": [step] * len(outcomes),
        "messages": [text[0] for text in texts],
        "tools": [text[1] for text in texts],
        "info": [text[2] for text in texts],
        **{
            column: [
                [{"name": _text(str(name)), "value": number} for name, number in getattr(record, column).items()]
                for record in records
            ]
            for column in _NUMBERS
        },
        "reason": [outcome.reason for outcome in outcomes],
        "flags": [[_text(flag) for flag in outcome.flags] for outcome in outcomes],
        "unrecorded": [outcome.unrecorded for outcome in outcomes],
        "num_turns": [len(record.turns) for record in records],
        "num_sampled_tokens": [record.num_sampled_tokens for record in records],
        "num_trained_tokens": [outcome.num_trained_tokens for outcome in outcomes],
        "num_breaks": [record.num_breaks for record in records],
        "turns": _lists([len(record.turns) for record in records], _turns(outcomes)),
    }
    arrays = [
        columns[field.name] if isinstance(columns[field.name], pa.Array) else _array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA), sum(text[3] for text in texts)


def _texts(record: TrajectoryRecord) -> tuple[str, str, str, bool]:
    """The JSON texts of messages, tools and info, and as the last item True if these texts were left out because the
    values are not JSON."""
    try:
        return _json(record.messages), _json(record.tools), _json(record.info), False
    except (TypeError, ValueError, RecursionError) as error:
        return "[]", "[]", _json({NOT_WRITTEN: f"messages and info were not written: {error_text(error)}"}), True


_JSON = json.JSONEncoder(allow_nan=False)
_ODD_KEYS = ('"true": ', '"false": ', '"null": ')
"""Keys that the encoder may have written for True, False or None. `plain` writes them differently."""


def _json(value: Any) -> str:
    """The JSON text of `plain(value)`. The value itself is tried first, because `plain` is slow and rarely needed."""
    try:
        text = _JSON.encode(value)
    except (TypeError, ValueError):
        return _JSON.encode(plain(value))
    return _JSON.encode(plain(value)) if any(key in text for key in _ODD_KEYS) else text


def _text(value: Any) -> Any:
    """Escape lone surrogates, which UTF-8 cannot encode. For example, `\\udce9` is written as these six characters."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode()


def _turns(outcomes: Sequence[TrajectoryOutcome]) -> pa.StructArray:
    turns = [turn for outcome in outcomes for turn in outcome.trajectory.turns]
    prompts = [
        prompt_to_json(turn, record.turns[:index])
        for outcome in outcomes
        for record in (outcome.trajectory,)
        for index, turn in enumerate(record.turns)
    ]
    special: dict[str, Callable[[], Any]] = {
        "outcome": lambda: [name for outcome in outcomes for name in outcome.turns],
        "prompt_of_turn": lambda: [prompt["of_turn"] for prompt in prompts],
        "prompt_shared": lambda: [prompt["shared"] for prompt in prompts],
        "prompt_new_ids": lambda: _token_lists([prompt["new_ids"] for prompt in prompts], np.int32),
        "completion_ids": lambda: _token_lists([turn.completion_ids for turn in turns], np.int32),
        "logprobs": lambda: _token_lists([turn.logprobs for turn in turns], np.float32),
        "trainer_logprobs": lambda: _token_lists(_each(outcomes, "trainer_logprobs"), np.float32),
        "gradients": lambda: _token_lists(_each(outcomes, "gradients"), np.float32),
        "teacher_logprobs": lambda: _token_lists(_each(outcomes, "teacher_logprobs"), np.float32),
        "policy_versions": lambda: _token_lists([turn.policy_versions for turn in turns], np.int32),
        "routed_experts": lambda: [_experts_to_bytes(turn.routed_experts) for turn in turns],
        "kept_sets": lambda: _set_lists([turn.kept_sets for turn in turns]),
        "tool_calls": lambda: [
            _json([vars(call) for call in turn.tool_calls]) if turn.tool_calls else "[]" for turn in turns
        ],
        **{f"seconds_{part}": _seconds(turns, part) for part in ("queued", "generated", "tools")},
    }
    arrays = []
    for field in TURN:
        make = special.get(field.name)
        values = list(map(attrgetter(field.name), turns)) if make is None else make()
        arrays.append(values if isinstance(values, pa.Array) else _array(values, field.type))
    return pa.StructArray.from_arrays(arrays, fields=list(TURN))


def _each(outcomes: Sequence[TrajectoryOutcome], name: str) -> list[NDArray[Any] | None]:
    """For each turn, its per-token array of this name from the trainer or a teacher; None if the turn has no such
    array."""
    return [array for outcome in outcomes for array in getattr(outcome, name) or (None,) * len(outcome.turns)]


def _seconds(turns: Sequence[Turn], part: str) -> Callable[[], list[float | None]]:
    return lambda: [None if turn.timing is None else getattr(turn.timing, part) for turn in turns]


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind in (NAME, pa.string()):  # environments may use numbers as names of reward parts or agents
        values = [value if value is None else _text(str(value)) for value in values]
    return pa.array(values, kind)


def _token_lists(arrays: Sequence[NDArray[Any] | None], dtype: type) -> pa.ListArray:
    """A column with one list per array; None becomes null. It is built from one flat array, without Python lists."""
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.empty(0, dtype=dtype)
    missing = pa.array([array is None for array in arrays], pa.bool_())
    values = pa.array(values.astype(dtype, copy=False))
    return _lists([0 if array is None else len(array) for array in arrays], values, missing)


def _set_lists(kept: Sequence[KeptSets | None]) -> pa.ListArray:
    """A column with one list of sets per turn; None becomes null."""
    present = [each for each in kept if each is not None]
    ids = pa.array(np.concatenate([each.ids for each in present]) if present else np.empty(0, dtype=np.int32))
    sets = _lists([count for each in present for count in each.counts.tolist()], ids)
    missing = pa.array([each is None for each in kept], pa.bool_())
    return _lists([0 if each is None else len(each) for each in kept], sets, missing)


def _lists(lengths: Sequence[int], values: pa.Array, missing: pa.Array | None = None) -> pa.ListArray:
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    assert ends[-1] == len(values) < 2**31, "a list's offsets are int32"
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), values, mask=missing)


def _experts_to_bytes(experts: Experts | None) -> bytes | None:
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return file.getvalue()


def from_table(table: pa.Table | pa.RecordBatch) -> Iterator[TrajectoryOutcome]:
    """Convert rows to outcomes. The inverse of `to_table`.

    Raises:
        ValueError, KeyError, TypeError: the rows are not valid outcomes.
    """
    for found in records_of(table):
        trainer, gradients, teacher = (tuple(turn[name] for turn in found.turns) for name in _ADDED)
        was_trained = any(array is not None for array in trainer)
        yield TrajectoryOutcome(
            trajectory=trajectory_from_json(found.record),
            turns=found.outcomes,
            reason=found.row["reason"],
            unrecorded=found.row["unrecorded"],
            flags=tuple(found.row["flags"]),
            trainer_logprobs=trainer if was_trained else (),
            gradients=gradients if was_trained else (),
            teacher_logprobs=teacher if any(array is not None for array in teacher) else (),
        )


@dataclass(frozen=True, kw_only=True)
class StoredOutcome:
    """A row as it is stored, without reconstructing prompts."""

    record: Mapping[str, Any]
    """The trajectory, in the form that `trajectory_from_json` accepts."""
    row: Mapping[str, Any]
    """The columns that are not part of the trajectory: `step`, `reason`, `flags`, `unrecorded` and counts."""
    outcomes: tuple[str, ...]
    """The outcome of each turn's completion."""
    turns: tuple[Mapping[str, NDArray[Any] | None], ...]
    """The per-token arrays of each turn by column. They include the columns in `_ADDED`, which are not part of the
    trajectory, and `kept_counts`, the sizes of the turn's kept sets."""


def records_of(table: pa.Table | pa.RecordBatch) -> Iterator[StoredOutcome]:
    """Yield the rows of a table.

    Raises:
        ValueError, KeyError, TypeError: the rows are not valid outcomes.
    """
    plain_columns = [name for name in table.schema.names if name != "turns"]
    rows = table.select(plain_columns).to_pylist()
    turns = _read_turns(table.column("turns"))
    for row in rows:
        own = [next(turns) for _ in range(row["num_turns"])]
        fields = {name: row[name] for name in plain_columns if name not in _SAME}
        fields |= {name: json.loads(row[name]) for name in ("messages", "tools", "info")}
        fields |= {column: {each["name"]: each["value"] for each in row[column]} for column in _NUMBERS}
        fields["turns"] = [turn for _, turn, _ in own]
        beside = {name: row[name] for name in _OF_ROW}
        yield StoredOutcome(
            record=fields,
            row=beside,
            outcomes=tuple(outcome for outcome, _, _ in own),
            turns=tuple(tokens for _, _, tokens in own),
        )


_Tokens = Mapping[str, NDArray[Any] | None]
_ADDED = ("trainer_logprobs", "gradients", "teacher_logprobs")
"""Per-token columns from the trainer and a teacher, which are not part of a trajectory."""
_TOKENS = ("prompt_new_ids", "completion_ids", "logprobs", "policy_versions", *_ADDED)


def _read_turns(column: pa.Array | pa.ChunkedArray) -> Iterator[tuple[str, dict[str, Any], _Tokens]]:
    """Yield the outcome, the record and the per-token arrays of each turn."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for chunk in chunks:
        turns = chunk.flatten()
        names = [field.name for field in TURN if field.name not in (*_TOKENS, "kept_sets")]
        tokens = {name: _read_lists(turns.field(name)) for name in _TOKENS}
        kept = _read_sets(turns.field("kept_sets"))
        for index, row in enumerate(pa.Table.from_arrays([turns.field(name) for name in names], names).to_pylist()):
            found = {name: lists[index] for name, lists in tokens.items()}
            record = _turn_record(row, found)
            sets = kept[index]
            if sets is not None:
                record["kept_sets"] = sets
            yield (
                row["outcome"],
                record,
                found | {"kept_counts": None if sets is None else sets.counts.astype(np.int32)},
            )


def _read_lists(column: pa.ListArray) -> list[NDArray[Any] | None]:
    """One array per list, as views of the column's values without copying; None for null."""
    ends, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=True)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return [values[ends[i] : ends[i + 1]] if present[i] else None for i in range(len(column))]


def _read_sets(column: pa.ListArray) -> list[KeptSets | None]:
    """The kept sets of each turn."""
    sets, ends = column.values, column.offsets.to_numpy()
    ids, offsets = sets.values.to_numpy(zero_copy_only=True), sets.offsets.to_numpy().astype(np.int64)
    found: list[KeptSets | None] = []
    for is_there, start, end in zip(column.is_valid().to_pylist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        own = offsets[start : end + 1]
        found.append(KeptSets(ids=ids[own[0] : own[-1]], offsets=own - own[0]) if is_there else None)
    return found


def _turn_record(row: Mapping[str, Any], tokens: _Tokens) -> dict[str, Any]:
    """A turn in the form that `trajectory_from_json` accepts."""
    queued = row["seconds_queued"]
    timing = (
        None
        if queued is None
        else {"queued": queued, "generated": row["seconds_generated"], "tools": row["seconds_tools"]}
    )
    record = {
        "prompt": {
            "of_turn": row["prompt_of_turn"],
            "shared": row["prompt_shared"],
            "new_ids": tokens["prompt_new_ids"],
        },
        "completion_ids": tokens["completion_ids"],
        "logprobs": tokens["logprobs"],
        "policy_versions": tokens["policy_versions"],
        "timing": timing,
        "tool_calls": json.loads(row["tool_calls"]),
        **{
            name: row[name]
            for name in (
                "stop_reason",
                "temperature",
                "reward",
                "advantage",
                "state_key",
                "agent",
                "parse_status",
                "trained",
            )
        },
    }
    if row["routed_experts"] is not None:
        record["routed_experts"] = base64.b64encode(row["routed_experts"]).decode()
    return record
