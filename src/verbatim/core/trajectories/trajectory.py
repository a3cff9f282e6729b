"""Defines the trajectory, which is also a read-only mapping of plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.core.errors import NoFlatList
from verbatim.core.records.fields import TEACHER
from verbatim.core.records.samples import TrainingSample
from verbatim.core.trajectories.openings import is_one_list
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.trajectories.samples import build_samples
from verbatim.core.user_values import as_atom


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory(TrajectoryRecord, Mapping[str, Any]):
    """The record of one episode: every turn as exact ids, the conversation, and the reward.

    It is also a read-only mapping of plain values, so that `json.dumps(dict(trajectory))` and `yaml.safe_dump` work.
    Its keys are all fields by name, the keys documented for rollouts (`messages`, `input_ids`, `labels`, `logprobs`,
    `turns` as a count, `samples`), `id` for the example's id, and what the caller of a rollout passed next to
    `messages`. With a break, or without token ids (some servers return none), the flat lists `input_ids`, `labels` and
    `logprobs` are not among the keys, and reading any of them raises `NoFlatList`.

    Raises:
        RecordError: a reward, a part of a reward or an advantage is not a single number.

    Example:
        >>> from verbatim import Turn
        >>> first = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
        >>> second = Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-0.25])
        >>> t = Trajectory(example_id="x", turns=(first, second), reward=1.0)
        >>> t["turns"], t["input_ids"], t["labels"]
        (2, [1, 2, 3, 4, 5], [-100, -100, 3, -100, 5])
        >>> t.num_stored_tokens
        5
    """

    def __getitem__(self, key: str) -> Any:
        match key:
            case "turns":
                return len(self.turns) + self.num_unrecorded_turns
            case "input_ids" | "labels" | "logprobs":
                return getattr(self._flat(), key)
            case "samples":
                return [_plain_sample(sample) for sample in build_samples(self)]
            case "id":
                return self.example_id
            case _ if key in _FIELDS:
                return _plain(getattr(self, key))
        beside = self._beside_messages()
        if key in beside:
            return _plain(beside[key])
        raise KeyError(f"{key!r}; a trajectory has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        yield from _FIELDS
        if self._has_flat_lists():
            yield from _FLAT
        yield from ("samples", "id")
        yield from (name for name in self._beside_messages() if name not in TRAJECTORY_KEYS)

    def __contains__(self, key: object) -> bool:
        # Mapping's own method would compute the value: for example, all samples.
        return any(key == name for name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _beside_messages(self) -> Mapping[str, Any]:
        """What the caller of a rollout passed next to the messages. A field of the trajectory takes precedence over a
        passed value with the same name."""
        task = self.info.get("task", {})
        return task if isinstance(task, Mapping) else {}

    # Trajectories are compared by identity, like the other records. Mapping would compare contents, and so would not be
    # hashable.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def _has_flat_lists(self) -> bool:
        return bool(self.turns) and is_one_list(self.turns)

    def _why_not_flat(self) -> str:
        if self.turns:
            why = f"{self.num_breaks} break(s)" if self.num_breaks else "turns of several agents"
            return (
                f"{why}: one list cannot hold two contexts. Read trajectory['samples'] instead, or "
                "build_samples(trajectory)"
            )
        asked = '; a server that supports it (vLLM) returns the ids with extra_body={"return_token_ids": True}'
        return f"no turn with token ids{asked if self.num_unrecorded_turns else ''}"

    def _flat(self) -> _Flat:
        if not self._has_flat_lists():
            raise NoFlatList(f"trajectory {self.trajectory_id or self.example_id!r} has {self._why_not_flat()}")
        ids = self.turns[-1].path.ids()
        labels = np.full(len(ids), -100, dtype=np.int64)
        logprobs: list[float | None] = [None] * len(ids)
        for turn in self.turns:
            if turn.logprobs is None or not turn.trained:
                continue  # context only: a token without a logprob is never a label
            start, end = turn.num_prompt_tokens, turn.path.length
            labels[start:end] = turn.completion_ids
            logprobs[start:end] = turn.logprobs.tolist()
        return _Flat(ids.tolist(), labels.tolist(), logprobs)


@dataclass(frozen=True)
class _Flat:
    input_ids: list[int]
    labels: list[int]
    logprobs: list[float | None]


_FIELDS = tuple(f.name for f in dataclasses.fields(Trajectory))
_FLAT = tuple(f.name for f in dataclasses.fields(_Flat))
TRAJECTORY_KEYS = frozenset({*_FIELDS, *_FLAT, "samples", "id"})
"""The mapping view's own keys."""


def _plain(value: Any) -> Any:
    """Convert records and arrays to dicts and lists, and strings and numbers to Python's own types; other values are
    unchanged."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {as_atom(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return as_atom(value)


def _plain_sample(sample: TrainingSample) -> dict[str, Any]:
    """A sample as lists with one entry per token; a missing logprob is None, as in the flat list.

    Each logprob stream is under its name with "_logprobs" appended; `teacher_logprobs` is always present.
    """
    streams = {TEACHER: None, **sample.logprob_streams}
    names = {f.name for f in dataclasses.fields(sample)} - {"logprob_streams", "routed_experts", "kept_sets"}
    fields = {name: _plain(getattr(sample, name)) for name in names}
    fields |= {f"{name}_logprobs": _plain(stream) for name, stream in streams.items()}
    for name in ("logprobs", *(f"{stream}_logprobs" for stream in streams)):
        if fields[name] is not None:
            fields[name] = [None if math.isnan(logprob) else logprob for logprob in fields[name]]
    return fields
