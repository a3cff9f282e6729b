"""Defines a turn: one model request and its response, as exact ids."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError
from verbatim.core.records.experts import Experts, as_experts
from verbatim.core.records.fields import Float32, as_number
from verbatim.core.records.kept import KeptSets, as_kept_sets
from verbatim.core.records.messages import ParseStatus, StopReason, ToolCall
from verbatim.core.token_tree import LARGEST_ID, Ids, Int32, TokenPath, TokenTree, as_ids, of_list

MAX_POSITIVE_LOGPROB = 1e-4
"""A logprob that exceeds 0 by at most this is treated as a rounding error and stored as 0. Larger values are
refused."""
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
_SMALLEST = int(np.float32(np.finfo(np.float32).min).view(np.int32))
"""The bits of the smallest finite float32, read as an integer. If the bits of a float are read as an integer, every
other finite negative float gives a smaller integer than this number, and every value that needs a closer check (-inf,
NaN, 0, positive numbers) gives a larger integer."""


@dataclass(frozen=True, kw_only=True)
class TurnTiming:
    """How long the parts of one turn took, in wall-clock seconds."""

    queued: float = 0.0
    """Time from the request to the processing of the first prompt token."""
    generated: float = 0.0
    """Time from the processing of the first prompt token to the last sampled token."""
    tools: float = 0.0
    """Time in tools and the environment after the completion."""


@dataclass(frozen=True, kw_only=True, eq=False, init=False, slots=True)
class Turn:
    """One model request and its response, as exact ids.

    A turn is created from `prompt_ids` and `completion_ids`, or from `completion_ids` and a `path` of a `TokenTree`
    that ends with these ids.

    Raises:
        RecordError: lengths that do not match, numbers that are not ids, a logprob that is NaN, infinite or above 0, a
            kept set without the sampled id, or a reward or advantage that is not a single number.
    """

    path: TokenPath
    """The stored sequence of prompt and completion; turns of a trajectory share their common prefixes."""
    completion_ids: Int32
    """The exact sampled ids, including the stop token: int32 [C]."""
    logprobs: Float32 | None = None
    """Logprob of each completion id under the sampling distribution, float32 [C], or None if missing."""
    policy_versions: Int32 | None = None
    """The policy version that sampled each completion id, int32 [C], or None if unknown."""
    routed_experts: Experts | None = None
    """The experts that processed the last N tokens, not counting the final token, which was sampled but not processed:
    [N, D, K]. The field is None if no experts were recorded. Earlier turns have the experts of earlier tokens."""
    kept_sets: KeptSets | None = None
    """The kept sets of the C completion ids, or None if nothing was cut or if this is unknown."""
    stop_reason: StopReason = StopReason.STOP
    """Why the completion ended."""
    temperature: float = 1.0
    """The sampling temperature."""
    reward: float | None = None
    """The reward of this turn alone, or None if turns are not rewarded separately."""
    advantage: float | None = None
    """The advantage of this turn's tokens, or None to use the trajectory's advantage."""
    state_key: str | None = None
    """Name of the environment state in which the turn acted (for `gigpo`)."""
    agent: str = "main"
    """Name of the agent that made the request."""
    parse_status: ParseStatus = "ok"
    """"ok", or the first error in the completion's tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """All attempted tool calls, in order."""
    timing: TurnTiming | None = None
    """Time spent on the turn."""
    trained: bool = True
    """True if the turn's tokens may be trained. An untrained turn is only context, and its tokens are counted as
    `untrained`."""
    attachments: None = None
    """Reserved for later: turns contain only text for now."""

    def __init__(
        self,
        *,
        completion_ids: Ids,
        prompt_ids: Ids | None = None,
        path: TokenPath | None = None,
        logprobs: Float32 | Sequence[float] | None = None,
        policy_versions: Int32 | Sequence[int] | None = None,
        routed_experts: Experts | None = None,
        kept_sets: KeptSets | Sequence[Sequence[int]] | None = None,
        stop_reason: StopReason = StopReason.STOP,
        temperature: float = 1.0,
        reward: float | None = None,
        advantage: float | None = None,
        state_key: str | None = None,
        agent: str = "main",
        parse_status: ParseStatus = "ok",
        tool_calls: Iterable[ToolCall] = (),
        timing: TurnTiming | None = None,
        trained: bool = True,
        attachments: None = None,
    ) -> None:
        if (prompt_ids is None) == (path is None):
            raise TypeError("a turn takes either prompt_ids or path")
        if path is None:
            completion = as_ids(completion_ids, "completion_ids")
            path, completion = TokenTree().add(as_ids(prompt_ids, "prompt_ids"), completion)
        else:
            added = path.added
            completion = added if added is completion_ids is not None else as_ids(completion_ids, "completion_ids")
            assert path.ends_with(completion), "the path does not end with the completion"
        count = len(completion)
        if path.length <= count:
            raise RecordError("prompt_ids: empty; nothing would predict the first completion id")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RecordError(f"temperature: expected a finite number >= 0, found {temperature}")
        _set_path(self, path)
        _set_completion_ids(self, completion)
        _set_logprobs(self, None if logprobs is None else _as_logprobs(logprobs, count))
        _set_policy_versions(self, None if policy_versions is None else _as_versions(policy_versions, count))
        _set_routed_experts(self, None if routed_experts is None else as_experts(routed_experts, path.length - 1))
        _set_kept_sets(self, None if kept_sets is None else as_kept_sets(kept_sets, completion))
        _set_stop_reason(self, stop_reason if type(stop_reason) is StopReason else StopReason(stop_reason))
        _set_temperature(self, temperature)
        _set_reward(self, None if reward is None else as_number(reward, "reward"))
        _set_advantage(self, None if advantage is None else as_number(advantage, "advantage"))
        _set_state_key(self, state_key)
        _set_agent(self, agent)
        _set_parse_status(self, parse_status)
        _set_tool_calls(self, tuple(tool_calls))
        _set_timing(self, timing)
        _set_trained(self, trained)
        _set_attachments(self, attachments)

    @property
    def prompt_ids(self) -> Int32:
        """The exact ids of the prompt: int32 [P]. Each access may build a new array."""
        return self.path.ids(self.num_prompt_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """P, the number of prompt tokens."""
        return self.path.length - len(self.completion_ids)

    def extends(self, earlier: Turn) -> bool:
        """True if the prompt starts with an earlier turn's prompt and completion, id for id.

        Both turns must belong to the same trajectory.
        """
        path, before = self.path, earlier.path
        assert path.tree is before.tree
        return before.length <= path.length - len(self.completion_ids) and path.starts_with(before)

    def replace(self, **changes: Any) -> Turn:
        """A copy with some fields changed; unchanged ids are shared, not copied.

        If only fields of `_BESIDE` change, ids and logprobs are not checked again: they were checked when this turn was
        created.
        """
        if changes.keys() <= _BESIDE:
            turn = object.__new__(type(self))
            for set_field, value in zip(_SETTERS.values(), _values_of(self), strict=True):
                set_field(turn, value)
            for name, value in changes.items():
                _SETTERS[name](turn, as_number(value, name) if name in ("reward", "advantage") else value)
            return turn
        if changes.keys() & {"prompt_ids", "completion_ids"} and "path" not in changes:
            changes = {"prompt_ids": self.prompt_ids, "path": None, **changes}
        return dataclasses.replace(self, **changes)


_SETTERS: dict[str, Callable[[Turn, Any], None]] = {
    field.name: getattr(Turn, field.name).__set__ for field in dataclasses.fields(Turn)
}
"""Setters of the fields, used to construct a turn; setting a field by name with `object.__setattr__` takes several
times as long."""
(_set_path, _set_completion_ids, _set_logprobs, _set_policy_versions, _set_routed_experts, _set_kept_sets,
 _set_stop_reason, _set_temperature, _set_reward, _set_advantage, _set_state_key, _set_agent, _set_parse_status,
 _set_tool_calls, _set_timing, _set_trained, _set_attachments) = _SETTERS.values()  # fmt: skip
_values_of = operator.attrgetter(*_SETTERS)
_BESIDE = frozenset({"reward", "advantage", "timing", "parse_status", "state_key", "agent", "trained"})
"""Fields that do not affect ids and logprobs."""


def _as_logprobs(values: object, expected: int) -> Float32:
    try:
        given = np.asarray(values, _FLOAT32)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"logprobs: every entry must be a number ({error}); pass None for a whole turn whose logprobs are missing"
        ) from None
    if given.ndim != 1 or len(given) != expected:
        raise RecordError(f"logprobs: {given.size} for {expected} completion ids")
    # This makes a copy that is read-only, because bytes are immutable.
    logprobs: Float32 = np.frombuffer(given.tobytes(), _FLOAT32)
    if expected:
        bits = logprobs.view(_INT32)
        if bits.item(bits.argmax()) > _SMALLEST:  # `argmax` takes a third of the time of `max`
            return _checked_logprobs(logprobs)
    return logprobs


def _checked_logprobs(logprobs: Float32) -> Float32:
    """Refuse values that are not logprobs; a positive rounding error becomes 0."""
    # NaN propagates through minimum and maximum, so two reductions suffice if all values are good.
    if math.isfinite(np.minimum.reduce(logprobs)) and np.maximum.reduce(logprobs) <= 0:
        return logprobs
    bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_POSITIVE_LOGPROB))
    if bad.size:
        raise RecordError(
            f"logprobs: {logprobs[bad[0]]} at position {int(bad[0])}; expected a finite number <= 0. "
            "A logprob that is not known is missing (None), never 0.0 or NaN"
        )
    below: Float32 = np.minimum(logprobs, np.float32(0))
    below.flags.writeable = False
    return below


def _as_versions(values: object, expected: int) -> Int32:
    listed = of_list(values) if type(values) is list and values and type(values[0]) is int else None
    try:
        given = np.asarray(values) if listed is None else listed
    except ValueError as error:
        raise RecordError(f"policy_versions: expected one list of integers ({error})") from None
    if given.ndim != 1 or len(given) != expected:
        raise RecordError(f"policy_versions: {given.size} for {expected} completion ids")
    if (given is listed or given.dtype != _INT32) and expected and not _fits_int32(given):
        raise RecordError(
            f"policy_versions: expected integers from -1 (unknown) to {LARGEST_ID}, found "
            f"{given.tolist()[:4]}; pass None for a whole turn whose versions are unknown"
        )
    versions = given if given.dtype == _INT32 else given.astype(_INT32)
    raw = versions.tobytes()  # as bytes, because then a single comparison tells whether all versions are equal
    if expected and raw == raw[:4] * expected:
        return _repeated(raw[:4], expected)
    kept: Int32 = np.frombuffer(raw, _INT32)
    return kept


def _fits_int32(numbers: NDArray[Any]) -> bool:
    if numbers.dtype.kind not in "iu":
        return False
    return bool(numbers.item(numbers.argmax()) <= LARGEST_ID and numbers.item(numbers.argmin()) >= -1)


@lru_cache(maxsize=4096)
def _repeated(number: bytes, count: int) -> Int32:
    """One int32 repeated `count` times with stride 0, to save memory: almost every completion has one version."""
    return np.ndarray(count, dtype=np.int32, buffer=number, strides=(0,))
