"""Builds the answer about one trajectory: its turns, with their tokens in parts that are small enough for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import UsageError
from verbatim.core.trajectories.outcome import TRAINED
from verbatim.core.trajectory_json import plain
from verbatim.logs.outcomes.table import StoredOutcome

MOST_OF_A_TURN, MOST_OF_ALL = 20_000, 60_000
"""Maximum numbers of tokens in one answer: of one turn, and of all turns together."""
LONGEST_TEXT = 200_000
"""Maximum length of a string in an answer, in characters."""
_PARALLEL = ("logprobs", "trainer_logprobs", "gradients", "teacher_logprobs", "policy_versions", "kept_counts")
"""The columns with one value per completion id."""
_LARGEST_INTEGER = 2**53
_PLAIN = ("stop_reason", "temperature", "parse_status", "tool_calls", "state_key", "timing")
Arrays = Mapping[str, NDArray[Any] | None]
"""The per-token arrays of a turn, by column."""
Part = dict[str, Any]


def turn_answers(found: StoredOutcome, breaks: Mapping[int, Mapping[str, Any]]) -> list[Part]:
    """Return all turns, each with its first tokens."""
    left, answers = MOST_OF_ALL, []
    prompts = prompt_lengths(found)
    contexts = [
        length + len(_array(arrays, "completion_ids")) for length, arrays in zip(prompts, found.turns, strict=True)
    ]
    turns: Sequence[Mapping[str, Any]] = found.record["turns"]
    for index, (turn, arrays, outcome) in enumerate(zip(turns, found.turns, found.outcomes, strict=True)):
        prompt = turn["prompt"]
        part = tokens_part(arrays, 0, min(left, MOST_OF_A_TURN))
        left -= len(part["prompt_new_ids"]) + len(part["completion_ids"])
        completion = len(_array(arrays, "completion_ids"))
        of_turn = prompt["of_turn"]
        answers.append(
            {
                "index": index,
                "agent": turn["agent"],
                "outcome": outcome,
                "trained": turn["trained"],
                "advantage": plain(turn["advantage"]),
                "reward": plain(turn["reward"]),
                **{name: turn.get(name) for name in _PLAIN},
                "prompt_of_turn": of_turn,
                "prompt_shared": prompt["shared"],
                "extends": of_turn if of_turn is not None and prompt["shared"] == contexts[of_turn] else None,
                "num_prompt_tokens": prompts[index],
                "num_prompt_new": len(_array(arrays, "prompt_new_ids")),
                "num_completion": completion,
                "num_trained": completion if outcome == TRAINED else 0,
                "break": breaks.get(index),
                **part,
            }
        )
    return answers


def prompt_lengths(found: StoredOutcome) -> list[int]:
    """Return the length in tokens of each turn's whole prompt."""
    return [
        turn["prompt"]["shared"] + len(_array(arrays, "prompt_new_ids"))
        for turn, arrays in zip(found.record["turns"], found.turns, strict=True)
    ]


def tokens_part(arrays: Arrays, offset: int, most: int) -> Part:
    """Return up to `most` of a turn's tokens, from `offset` on. A turn's tokens are the new tokens of its prompt,
    followed by its completion.

    Example: for a turn with 3 new prompt ids and a completion of 4, `offset = 2, most = 3` gives the last prompt id,
    the first two ids of the completion, and `tokens_omitted` 2.
    """
    prompt, completion = _array(arrays, "prompt_new_ids"), _array(arrays, "completion_ids")
    end = min(len(prompt) + len(completion), offset + max(0, most))
    first, last = max(0, offset - len(prompt)), max(0, end - len(prompt))
    part: Part = {
        "offset": offset,
        "prompt_new_ids": prompt[offset:end],
        "completion_ids": completion[first:last],
        "tokens_omitted": len(prompt) + len(completion) - end,
    }
    for name in _PARALLEL:
        values = arrays.get(name)
        part[name] = None if values is None else np.ascontiguousarray(values[first:last])
    return part


def one_part(found: StoredOutcome, turn: int, offset: int) -> Part:
    """Return more tokens of one turn.

    Raises:
        UsageError: the trajectory has no such turn, or the turn has no such offset.
    """
    if not 0 <= turn < len(found.turns):
        raise UsageError(f"turn = {turn}; the trajectory has turns 0 to {len(found.turns) - 1}")
    arrays = found.turns[turn]
    total = len(_array(arrays, "prompt_new_ids")) + len(_array(arrays, "completion_ids"))
    if not 0 <= offset <= total:
        raise UsageError(f"offset = {offset}; turn {turn} has {total} tokens")
    return {"index": turn, **tokens_part(arrays, offset, MOST_OF_A_TURN)}


def ids_of(parts: Sequence[Mapping[str, Any]]) -> set[int]:
    """The distinct token ids in these parts."""
    lists = [part[name] for part in parts for name in ("prompt_new_ids", "completion_ids")]
    return set(np.unique(np.concatenate(lists)).tolist()) if lists else set()


def cut_texts(value: Any, path: str, cuts: list[Part]) -> Any:
    """Return the value with long strings cut. The path, full length and remaining length of each cut string are added
    to `cuts`."""
    if isinstance(value, str):
        if len(value) <= LONGEST_TEXT:
            return value
        cuts.append({"path": path, "length": len(value), "shown": LONGEST_TEXT})
        return value[:LONGEST_TEXT]
    if isinstance(value, Mapping):
        names = {key: str(key).replace("~", "~0").replace("/", "~1") for key in value}
        return {key: cut_texts(inner, f"{path}/{names[key]}", cuts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [cut_texts(inner, f"{path}/{index}", cuts) for index, inner in enumerate(value)]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_INTEGER:
        return str(value)
    return value


def text_at(record: Mapping[str, Any], path: str) -> str:
    """Return the whole string at a path such as `messages/3/content`, where `~1` means `/` and `~0` means `~` (RFC
    6901).

    Raises:
        UsageError: there is no string at the path.
    """
    value: Any = record
    for part in path.split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list | tuple) and name.isascii() and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise UsageError(f"path = {path!r}: there is nothing at this path")
    if not isinstance(value, str):
        raise UsageError(f"path = {path!r}: a {type(value).__name__}; expected a string")
    return value


def _array(arrays: Arrays, name: str) -> Any:
    values = arrays.get(name)
    return np.empty(0, dtype=np.int32) if values is None else values
