"""Compares a step that was trained again with what is stored of it: metrics, values of each token, weights."""

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

Turn = tuple[str, int]
"""A trajectory's id, and the number of a turn."""


@dataclass(frozen=True, kw_only=True)
class MetricDifference:
    """One metric."""

    stored: float
    replayed: float

    @property
    def is_exact(self) -> bool:
        """Whether both are the same number, or both NaN."""
        return self.stored == self.replayed or (math.isnan(self.stored) and math.isnan(self.replayed))

    def is_within(self, rounding: float) -> bool:
        """Whether they differ by no more than this, relative to numbers above 1."""
        apart, scale = abs(self.stored - self.replayed), max(1.0, abs(self.stored), abs(self.replayed))
        return self.is_exact or (math.isfinite(apart) and apart <= rounding * scale)


def compare_metrics(stored: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, MetricDifference]:
    """The metrics that both have, but for those of the clock."""
    return {
        name: MetricDifference(stored=stored[name], replayed=float(value))
        for name, value in replayed.items()
        if name in stored and name not in _OF_THE_CLOCK
    }


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """One value of each trained token."""

    num_compared: int
    num_different: int
    """Tokens whose values are not the same bit for bit."""
    largest: float
    """The largest difference."""
    scale: float
    """The largest stored value, at least 1: differences are relative to it."""
    trajectory_id: str | None = None
    """Where that is; None where none differs."""
    turn: int = -1
    position: int = -1
    """The token's place in the turn's completion, from 0."""
    token_id: int = -1
    stored: float = math.nan
    replayed: float = math.nan
    num_only_stored: int = 0
    """Tokens that were trained then, and not now."""
    num_only_replayed: int = 0
    """Tokens that are trained now, and were not then."""

    @property
    def is_exact(self) -> bool:
        """Whether every token is there in both, with the same value."""
        return not (self.num_different or self.num_only_stored or self.num_only_replayed)

    def is_within(self, rounding: float) -> bool:
        """Whether the same tokens differ by no more than this."""
        return (
            not (self.num_only_stored or self.num_only_replayed)
            and math.isfinite(self.largest)
            and self.largest <= rounding * self.scale
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = dataclasses.asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}


def compare_tokens(
    outcomes: Sequence[TrajectoryOutcome],
    value: Callable[[TrajectoryOutcome], Sequence[Float32 | None]],
    replayed: Mapping[Turn, Float32],
    ids: Mapping[Turn, Int32],
) -> TokenDifference:
    """Compare a value of each token.

    Args:
        outcomes: The stored ones.
        value: Which value of theirs: an array for each turn.
        replayed: The values of now, of each trained turn.
        ids: The turns' completions.
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
    """The weights after the step."""

    num_different: int
    """Parameters that are not the same bit for bit."""
    num_parameters: int
    largest: float
    """The largest difference of a weight."""
    parameter: str | None
    """The one that has it; None where none differs."""

    @property
    def is_exact(self) -> bool:
        """Whether all are the same bit for bit."""
        return not self.num_different


def compare_weights(stored: Path, replayed: Path) -> WeightDifference:
    """Compare two folders of weights of one model, tensor by tensor."""
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
        file: Any = safe_open(path, framework="pt")
        found |= {key: (file, key) for key in file.keys()}  # noqa: SIM118  (no mapping)
    return found
