"""Compares a replayed step with the stored one: metrics, per-token values, weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Float32, Int32
from verbatim.run.replay_data import turns_of

_OF_THE_CLOCK = ("seconds", "tokens_per_second")
"""Metrics that depend on the machine's speed."""

Turn = tuple[str, int]
"""A turn's key: a trajectory id and the index of the turn."""


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """The stored and the replayed value of one metric."""

    stored: float
    replayed: float

    @property
    def is_exact(self) -> bool:
        """True if both values are the same number, or both are NaN."""
        return self.stored == self.replayed or (math.isnan(self.stored) and math.isnan(self.replayed))

    def is_within(self, rounding: float) -> bool:
        """True if the values differ by at most `rounding`, relative to the larger value if that is above 1."""
        apart, scale = abs(self.stored - self.replayed), max(1.0, abs(self.stored), abs(self.replayed))
        return self.is_exact or (math.isfinite(apart) and apart <= rounding * scale)


def compare_metrics(stored: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, MetricDifference]:
    """The metrics that exist on both sides, except metrics that measure time."""
    return {
        name: MetricDifference(stored=stored[name], replayed=float(value))
        for name, value in replayed.items()
        if name in stored and name not in _OF_THE_CLOCK
    }


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """The differences of one per-token value over all trained tokens."""

    num_compared: int
    num_different: int
    """Number of tokens whose values are not bitwise identical."""
    largest: float
    """The largest absolute difference."""
    scale: float
    """The largest absolute stored value, at least 1; tolerances are relative to it."""
    trajectory_id: str | None = None
    """The trajectory with the largest difference; None if no token differs. The next fields locate the token in it."""
    turn: int = -1
    position: int = -1
    """The token's index in the turn's completion."""
    token_id: int = -1
    stored: float = math.nan
    replayed: float = math.nan
    num_only_stored: int = 0
    """Number of tokens trained in the run but not in the replay."""
    num_only_replayed: int = 0
    """Number of tokens trained in the replay but not in the run."""

    @property
    def is_exact(self) -> bool:
        """True if run and replay trained the same tokens, with the same values."""
        return not (self.num_different or self.num_only_stored or self.num_only_replayed)

    def is_within(self, rounding: float) -> bool:
        """True if run and replay trained the same tokens, and the values differ by at most `rounding`, relative to
        `scale`."""
        return (
            not (self.num_only_stored or self.num_only_replayed)
            and math.isfinite(self.largest)
            and self.largest <= rounding * self.scale
        )

    def as_json(self) -> dict[str, Any]:
        """The fields as plain JSON values; NaN becomes None."""
        values = dataclasses.asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}


def compare_tokens(
    outcomes: Sequence[TrajectoryOutcome],
    value: Callable[[TrajectoryOutcome], Sequence[Float32 | None]],
    replayed: Mapping[Turn, Float32],
    ids: Mapping[Turn, Int32],
) -> TokenDifference:
    """Compare one value of each token.

    Args:
        outcomes: The stored outcomes.
        value: Returns the stored value of an outcome: one array per turn.
        replayed: The replayed value of each trained turn.
        ids: The completion ids of these turns.
    """
    stored = turns_of(outcomes, value)
    both = [turn for turn in replayed if turn in stored]
    num_different, largest = 0, 0.0
    place: tuple[Turn, int] | None = None
    scale = max([1.0, *(float(np.abs(stored[turn]).max(initial=0)) for turn in both)])
    for turn in both:
        differs = ~((stored[turn] == replayed[turn]) | (np.isnan(stored[turn]) & np.isnan(replayed[turn])))
        if not differs.any():
            continue
        num_different += int(differs.sum())
        # A NaN or infinity on one side is an infinite difference. Differences are in float64, because float32 could
        # overflow.
        apart = np.nan_to_num(np.abs(stored[turn].astype(np.float64) - replayed[turn]), nan=math.inf, posinf=math.inf)
        at = int(np.where(differs, apart, -1.0).argmax())
        if place is None or apart[at] > largest:
            largest, place = float(apart[at]), (turn, at)
    found = TokenDifference(
        num_compared=sum(len(replayed[turn]) for turn in both),
        num_different=num_different,
        largest=largest,
        scale=scale,
        num_only_stored=sum(len(stored[turn]) for turn in stored if turn not in replayed),
        num_only_replayed=sum(len(replayed[turn]) for turn in replayed if turn not in stored),
    )
    if place is None:
        return found
    turn, at = place
    return dataclasses.replace(
        found,
        trajectory_id=turn[0],
        turn=turn[1],
        position=at,
        token_id=int(ids[turn][at]),
        stored=float(stored[turn][at]),
        replayed=float(replayed[turn][at]),
    )


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """The difference between the stored and the replayed weights after the step."""

    num_different: int
    """Number of parameter tensors that are not bitwise identical."""
    num_parameters: int
    largest: float
    """The largest absolute difference of a single weight."""
    parameter: str | None
    """The parameter with the largest difference; None if no parameter differs."""

    @property
    def is_exact(self) -> bool:
        """True if all weights are bitwise identical."""
        return not self.num_different


def compare_weights(stored: Path, replayed: Path) -> WeightDifference:
    """Compare two folders with weights of the same model, tensor by tensor."""
    then, now = _tensors(stored), _tensors(replayed)
    assert then.keys() == now.keys(), f"parameters of two models: {sorted(then.keys() ^ now.keys())[:3]}"
    num_different, largest, parameter = 0, 0.0, None
    for name, (file, key) in then.items():
        one, other = file.get_tensor(key), now[name][0].get_tensor(now[name][1])
        if one.equal(other):
            continue
        num_different += 1
        apart = float((one.double() - other.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
        if parameter is None or apart > largest:
            largest, parameter = apart, name
    return WeightDifference(num_different=num_different, num_parameters=len(then), largest=largest, parameter=parameter)


def _tensors(folder: Path) -> dict[str, tuple[Any, str]]:
    from safetensors import safe_open

    found: dict[str, tuple[Any, str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(
            path, framework="pt"
        )  # this reads one tensor at a time, so that models of any size fit in memory
        found |= {key: (file, key) for key in file.keys()}  # noqa: SIM118  (not a mapping)
    return found
