"""Writes trajectories as JSON values and reads them back, exactly, to the last bit of every logprob.

A prompt is written in the way in which it is stored: the number of ids that it shares with the context (prompt and
completion) of an earlier turn, followed by the new ids. So a trajectory of L tokens and T turns takes O(L) space, not
O(T L).

Example, two turns of prompts `[1, 2]` and `[1, 2, 3, 4]` with completions `[3]` and `[5]`:

    {"example_id": "x", "reward": 1.0, "turns": [
        {"prompt": {"of_turn": null, "shared": 0, "new_ids": [1, 2]}, "completion_ids": [3], "logprobs": [-0.5], ...},
        {"prompt": {"of_turn": 0, "shared": 3, "new_ids": [4]}, "completion_ids": [5], "logprobs": [-0.25], ...}], ...}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verbatim.core.records.experts import experts_from_text, experts_to_text
from verbatim.core.texts import error_text
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.types import ToolCall, Trajectory, Turn, TurnTiming
from verbatim.core.user_values import as_atom, why_refused

_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
"""Types that JSON represents directly."""
NOT_WRITTEN = "not_written"
"""The only key in the `info` of a trajectory that was stored without its messages; the value of this key is the
reason."""


def trajectory_to_json(trajectory: TrajectoryRecord) -> dict[str, Any]:
    """Every field of the record; pass the result to `plain` to convert its arrays to lists."""
    record = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    turns = trajectory.turns
    record["turns"] = [_turn_to_json(turn, turns[:index]) for index, turn in enumerate(turns)]
    return record


def trajectory_from_json(record: Mapping[str, Any]) -> Trajectory:
    """The inverse of `trajectory_to_json`, from parsed JSON."""
    turns: list[Turn] = []
    for turn in record["turns"]:
        turns.append(_turn_from_json(turn, turns))
    fields = {
        **record,
        "turns": turns,
        "reward": _number(record["reward"]),
        "advantage": _number(record["advantage"]),
        "reward_parts": {name: float(part) for name, part in record["reward_parts"].items()},
        "agent_rewards": {name: float(own) for name, own in record["agent_rewards"].items()},
    }
    return Trajectory(**fields)


def was_cut(trajectory: TrajectoryRecord) -> bool:
    """True if a trajectory was stored without messages, tools and info, because these were not JSON. An environment's
    own `info` may also have the key `NOT_WRITTEN`, but then the trajectory has messages, or had no messages to lose."""
    return not (trajectory.messages or trajectory.tools) and list(trajectory.info) == [NOT_WRITTEN]


def plain(value: Any) -> Any:
    """A value with arrays as lists, and non-finite numbers as the strings "NaN", "Infinity" and "-Infinity", which
    `float()` reads back."""
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind is dict:
        return {
            key if type(key) is str else str(as_atom(key)): inner if type(inner) in _AS_THEY_ARE else plain(inner)
            for key, inner in value.items()
        }
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(as_atom(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return as_atom(value)


def prompt_to_json(turn: Turn, earlier: Sequence[Turn]) -> dict[str, Any]:
    """A turn's prompt as three values: `of_turn`, the index of the earlier turn whose context begins with the same ids;
    `shared`, the number of these ids; and `new_ids`, the ids that follow them."""
    prompt = turn.num_prompt_tokens
    best, shared = None, 0
    if earlier and turn.extends(earlier[-1]):  # this is the common case: no other turn shares more
        best, shared, earlier = len(earlier) - 1, len(earlier[-1].path), ()
    for index in range(len(earlier) - 1, -1, -1):
        context = earlier[index].path
        if len(context) <= shared:
            continue
        length = min(prompt, turn.path.shared_with(context))
        if length > shared:
            best, shared = index, length
        if length == len(context):
            break  # this is an exact extension: no earlier turn shares more
    return {"of_turn": best, "shared": shared, "new_ids": turn.path.ids(prompt, start=shared)}


def why_not_json(value: Any) -> str | None:
    """Why a value cannot be written as JSON, or None if it can.

    >>> why_not_json({"a": [1.0, None]}), why_not_json({"when": {1, 2}})
    (None, "['when'] is a set; expected texts, numbers, booleans, None, lists and mappings")
    """
    if (why := why_refused(value, of_info=True)) is not None:
        return why
    try:
        json.dumps(plain(value), allow_nan=False)
    except Exception as error:  # noqa: BLE001  a key of a user's own type may raise anything
        return error_text(error)
    return None


def _turn_to_json(turn: Turn, earlier: Sequence[Turn]) -> dict[str, Any]:
    record = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn) if f.name != "path"}
    if turn.routed_experts is None:
        del record["routed_experts"]
    else:
        record["routed_experts"] = experts_to_text(turn.routed_experts)
    if turn.kept_sets is None:
        del record["kept_sets"]
    else:
        record["kept_sets"] = [turn.kept_sets[place] for place in range(len(turn.kept_sets))]
    record["prompt"] = prompt_to_json(turn, earlier)
    record["tool_calls"] = [dict(vars(call)) for call in turn.tool_calls]
    record["timing"] = dict(vars(turn.timing)) if turn.timing else None
    return record


def _turn_from_json(record: Mapping[str, Any], earlier: Sequence[Turn]) -> Turn:
    prompt, timing = record["prompt"], record["timing"]
    known = [] if prompt["of_turn"] is None else earlier[prompt["of_turn"]].path.ids()[: prompt["shared"]]
    fields = {key: value for key, value in record.items() if key != "prompt"}
    fields |= {
        "prompt_ids": np.concatenate([known, prompt["new_ids"]]).astype(np.int32),
        "tool_calls": tuple(ToolCall(**call) for call in record["tool_calls"]),
        "timing": TurnTiming(**timing) if timing else None,
        "reward": _number(record["reward"]),
        "advantage": _number(record["advantage"]),
    }
    if "routed_experts" in record:
        fields["routed_experts"] = experts_from_text(record["routed_experts"])
    return Turn(**fields)


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)  # NaN and infinities are stored as strings
