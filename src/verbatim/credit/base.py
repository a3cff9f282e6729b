"""What an advantage function sees and returns, and how its answer reaches the trajectories."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.errors import ComponentError
from verbatim.types import Group, Trajectory


@dataclass(frozen=True)
class AdvantageInputs:
    """One group: its rollouts without an error, filtered ones included."""

    rollouts: Sequence[Trajectory]
    """Each is also a mapping: `rollout["reward"]`."""


@dataclass(frozen=True)
class AdvantageOutputs:
    """One advantage for each rollout: a number, or a list with one number for each of its turns."""

    advantages: Sequence[float | Sequence[float]]
    """As long as `rollouts`."""


AdvantageFunction = Callable[..., AdvantageOutputs]
"""`function(inputs: AdvantageInputs, **knobs) -> AdvantageOutputs`."""


def assign_advantages(group: Group, function: AdvantageFunction) -> Group:
    """The group with advantages on its completed trajectories.

    A rollout whose advantage is NaN or infinite fails alone: it gets an error and never reaches the trainer.

    Raises:
        ComponentError: the function returned something else than one number, or one list of numbers with one
            for each turn, for each rollout.
    """
    completed = group.completed
    if not completed:
        return group
    name = function_name(function)
    try:
        outputs = function(AdvantageInputs(rollouts=completed))
    except Exception as error:  # a user's function may raise anything, all of it theirs to mend
        raise ComponentError(
            f"advantage {name} raised {type(error).__name__} for group {group.group_id}: {error}"
        ) from error
    advantages = list(getattr(outputs, "advantages", None) or ())
    if len(advantages) != len(completed):
        raise ComponentError(
            f"advantage {name} returned {len(advantages)} advantages for the {len(completed)} rollouts of group "
            f"{group.group_id}; expected AdvantageOutputs(advantages=[one for each rollout])"
        )
    credited = {
        id(trajectory): _credit(trajectory, advantage, f"advantage {name}, group {group.group_id}")
        for trajectory, advantage in zip(completed, advantages, strict=True)
    }
    return Group(
        group_id=group.group_id, example_id=group.example_id, env=group.env,
        trajectories=tuple(credited.get(id(t), t) for t in group.trajectories),
    )  # fmt: skip


def _credit(trajectory: Trajectory, advantage: float | Sequence[float], where: str) -> Trajectory:
    if isinstance(advantage, Sequence):
        values = [float(value) for value in advantage]
        if len(values) != len(trajectory.turns):
            raise ComponentError(f"{where}: {len(values)} advantages for the {len(trajectory.turns)} turns of rollout "
                                 f"{trajectory.sample_index}")  # fmt: skip
        if not all(map(math.isfinite, values)):
            return trajectory.replace(error=f"advantage: {values} is not finite")
        turns = tuple(t.replace(advantage=v) for t, v in zip(trajectory.turns, values, strict=True))
        return trajectory.replace(turns=turns)
    value = float(advantage)
    if not math.isfinite(value):
        return trajectory.replace(error=f"advantage: {value} is not finite")
    return trajectory.replace(advantage=value)


def function_name(function: Callable[..., Any]) -> str:
    """How to name a component to a person."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)
