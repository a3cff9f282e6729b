"""The filters that look at one figure of a trajectory: its mean logprob, how it ended, its advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from verbatim.algorithms.filters.base import Action, Reads
from verbatim.core.errors import ComponentError
from verbatim.core.records.equality import are_equal
from verbatim.core.types import Trajectory

Reason = Literal["length", "max_turns", "malformed", "cancelled", "api_error"]


@dataclass(frozen=True, kw_only=True)
class Gibberish:
    """Flags a trajectory when the mean logprob of its sampled tokens is below `threshold`.

    Turns without logprobs, and those that are not trained, are left out; where none has any, nothing is flagged.

    Example: turns with the logprobs `[-6, -1]` and `[-8]` have the mean -5, which is below -4.
    """

    reads: ClassVar[Reads] = "logprobs"

    threshold: Annotated[float, Field(le=0)] = -4.0
    """In nats; e^-4 is a probability of 0.018."""
    action: Action = "drop"
    """"drop" or "monitor"."""

    def __post_init__(self) -> None:
        if not self.threshold <= 0:
            raise ComponentError(f"gibberish: threshold = {self.threshold}; expected a logprob <= 0, for example -4.0")

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether the tokens are too unlikely."""
        logprobs = [turn.logprobs for turn in trajectory.turns if turn.trained and turn.logprobs is not None]
        count = sum(map(len, logprobs))
        total = math.fsum(float(own.sum(dtype="float64")) for own in logprobs)
        return count > 0 and total / count < self.threshold


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """Flags a trajectory that did not come to its own end: `truncated` is true, as docs/rollouts.md has it for each of
    the stop reasons.

    It stays in its group's baseline: what was cut off says how good the others are, and is not learned from itself.

    Example: `reasons = ["length"]` flags a trajectory that hit `max_tokens`, the context or its token budget, and not
    one that hit `max_turns`.
    """

    reasons: tuple[Reason, ...] = get_args(Reason)
    """The stop reasons that count. With all of them a truncated trajectory without a stop reason counts too."""
    action: Action = "drop"
    """"drop" or "monitor"."""

    def __post_init__(self) -> None:
        unknown = [reason for reason in self.reasons if reason not in get_args(Reason)]
        if unknown or not self.reasons:
            raise ComponentError(
                f"truncated: reasons = {list(self.reasons)}; expected some of {', '.join(get_args(Reason))}"
            )

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether it was cut off."""
        if trajectory.stop_reason is None:
            return trajectory.truncated and set(self.reasons) == set(get_args(Reason))
        return trajectory.truncated and trajectory.stop_reason.value in self.reasons


@dataclass(frozen=True, kw_only=True)
class ZeroAdvantage:
    """Flags a trajectory when the advantage of every one of its sampled tokens is 0, or at most 1e-6 away from it.

    Turns that are not trained are left out, unless no other turn sampled anything.
    """

    reads: ClassVar[Reads] = "advantages"

    action: Action = "drop"
    """"drop" or "monitor"."""

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether all advantages are 0."""
        of_trajectory = trajectory.advantage or 0.0
        sampled = [turn for turn in trajectory.turns if len(turn.completion_ids)]
        trained = [turn for turn in sampled if turn.trained]
        return all(
            are_equal((of_trajectory if turn.advantage is None else turn.advantage, 0.0)) for turn in trained or sampled
        )
