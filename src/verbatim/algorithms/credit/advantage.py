"""Defines an advantage function's inputs and outputs, and assigns its advantages to the trajectories."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.algorithms.credit.length_penalty import penalised
from verbatim.algorithms.credit.shares import Share, agents_with_rewards, share_of
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.errors import ComponentError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.types import Group, Trajectory, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdvantageInputs:
    """One group: the group's rollouts without an error, including rollouts that filters will drop.

    If agents have their own rewards, the inputs contain only one agent's share of each rollout.
    """

    rollouts: Sequence[Trajectory]
    """The rollouts. Each is also a mapping: `rollout["reward"]`."""

    @property
    def rewards(self) -> list[float]:
        """The reward of each rollout, after length penalties."""
        return [float(rollout["reward"]) for rollout in self.rollouts]


@dataclass(frozen=True)
class AdvantageOutputs:
    """One advantage per rollout: a number, or a list with one number per turn."""

    advantages: Sequence[float | Sequence[float]]
    """The advantages, in the order of `rollouts`."""


_LARGEST = 3.4028234663852886e38
"""The largest float32, the dtype in which samples store advantages."""

AdvantageFunction = Callable[..., AdvantageOutputs]
"""`function(inputs: AdvantageInputs, **parameters) -> AdvantageOutputs`."""


@dataclass(frozen=True)
class Advantage:
    """An entry of `ADVANTAGES`: the function, and what a run must know about the function.

    A plain function can be used instead; it has the default properties.
    """

    function: AdvantageFunction
    """`function(inputs: AdvantageInputs, **parameters) -> AdvantageOutputs`; `parameters` are set in the configuration
    file."""
    compares_rewards: bool = False
    """True if the function only compares the rewards of a group's rollouts with each other. Then a group of one has the
    advantage 0, and turn rewards are not used."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments from the configuration file, passed with every call."""

    def __call__(self, inputs: AdvantageInputs, **parameters: Any) -> AdvantageOutputs:
        """Call the function with its parameters."""
        return self.function(inputs, **{**self.parameters, **parameters})


def assign_advantages(
    group: Group,
    function: AdvantageFunction,
    length_penalty: LengthPenaltyConfig | None = None,
    *,
    max_length: int | None = None,
    needs_logprobs: bool = False,
) -> Group:
    """The group, with advantages added to its completed trajectories.

    If agents have their own rewards, the function is called once for each of these agents, with rollouts that contain
    only this agent's turns and reward, and once for all other agents together, with rollouts that contain their turns
    and the trajectory's `reward`. A length penalty is applied to these partial rollouts. The advantage returned for a
    rollout then goes to the turns that this rollout contains.

    A rollout whose reward or advantage is missing, NaN, infinite or beyond float32 fails alone: it gets an error and
    never reaches the trainer. A bad reward does not count in any baseline. A length penalty changes only the rewards
    that the function sees, not the rewards stored in the trajectories. A length penalty counts only trained tokens,
    which are found with `max_length` and `needs_logprobs`, as in `trajectories.build`.

    Raises:
        ComponentError: the function raised, or did not return, for each rollout, a number or a list with one number per
            turn.
    """
    # This comes before any call: a NaN reward would make the whole group's baseline NaN.
    group = _without_bad_rewards(group)
    if not group.completed:
        return group
    where = f"advantage {function_name(function)}, group {group.group_id}"
    # The keys are object identities, because trajectory ids may be empty outside a run.
    credited = {id(t): t for t in group.completed}
    for agent in agents_with_rewards(group.completed):
        shares = [s for s in (share_of(t, agent) for t in group.completed) if s is not None]
        views = [share.view for share in shares]
        seen = (
            views
            if length_penalty is None
            else penalised(views, length_penalty, max_length=max_length, needs_logprobs=needs_logprobs)
        )
        said = f"{where}, agent {agent}" if agent is not None else where
        for share, advantage in zip(shares, _call(function, seen, said), strict=True):
            key = id(share.whole)
            credited[key] = _credit(credited[key], share, advantage, said)
    return dataclasses.replace(group, trajectories=tuple(credited.get(id(t), t) for t in group.trajectories))


def try_advantage(function: AdvantageFunction) -> None:
    """Call an advantage function before a run, with two made-up rollouts of two turns each and rewards of 1 and 0.

    An exception is only logged, because the function may need something that only real rollouts contain.

    Raises:
        ComponentError: the function returned something other than advantages for these rollouts.
    """
    rollouts = [
        Trajectory(
            example_id="made-up",
            sample_index=index,
            reward=reward,
            turns=tuple(
                Turn(prompt_ids=prompt, completion_ids=[2], logprobs=[-1.0], reward=earned, state_key=str(len(prompt)))
                for prompt, earned in (([1], 0.0), ([1, 2, 1], reward))
            ),
        )
        for index, reward in enumerate((1.0, 0.0))
    ]
    try:
        _call(function, rollouts, f"advantage {function_name(function)}, tried on two made-up rollouts")
    except ComponentError as error:
        if error.__cause__ is None:  # without a cause, the result was wrong; with a cause, the function itself raised
            raise
        logger.warning("%s; the run will stop with this error if its own rollouts cause it too", error)
        return
    assign_advantages(Group(group_id="made-up", example_id="made-up", env="", trajectories=tuple(rollouts)), function)


def _without_bad_rewards(group: Group) -> Group:
    reasons = [t.bad_reward if t.error is None else None for t in group.trajectories]
    if not any(reasons):
        return group
    return dataclasses.replace(
        group,
        trajectories=tuple(
            t if reason is None else t.replace(error=reason)
            for t, reason in zip(group.trajectories, reasons, strict=True)
        ),
    )


def _call(function: AdvantageFunction, rollouts: Sequence[Trajectory], where: str) -> Sequence[object]:
    """Call the function and return its advantage for each rollout."""
    try:
        outputs = function(AdvantageInputs(rollouts=rollouts))
    except ComponentError as error:
        raise ComponentError(f"{where}: {error}") from error
    except Exception as error:  # a user's function may raise anything
        if is_out_of_memory(error):
            raise
        raise ComponentError(f"{where}: raised {type(error).__name__}: {error}") from error
    advantages = getattr(outputs, "advantages", None)
    expected = f"expected AdvantageOutputs(advantages=[one for each of {len(rollouts)} rollouts])"
    if not isinstance(advantages, Iterable) or isinstance(advantages, str | Mapping):
        raise ComponentError(f"{where}: returned {type(outputs).__name__}; {expected}")
    advantages = list(advantages)
    if len(advantages) != len(rollouts):
        raise ComponentError(f"{where}: returned {len(advantages)} advantages; {expected}")
    return advantages


def _credit(trajectory: Trajectory, share: Share, advantage: Any, where: str) -> Trajectory:
    """The trajectory, with the advantage added to one share of its turns."""
    # By its type, a tensor or array without dimensions is iterable, but it is a single number.
    of_turns = isinstance(advantage, Iterable) and getattr(advantage, "ndim", 1) > 0
    try:
        values = [_number(value) for value in (advantage if of_turns else [advantage])]
    except (TypeError, ValueError) as error:
        raise ComponentError(
            f"{where}: returned {advantage!r} for rollout {trajectory.sample_index} ({error}); "
            "expected a number, or a list with one for each of its turns"
        ) from error
    if of_turns and len(values) != len(share.places):
        raise ComponentError(
            f"{where}: {len(values)} advantages for the {len(share.places)} turns of rollout {trajectory.sample_index}"
        )
    if not all(abs(value) <= _LARGEST for value in values):  # also catches NaN, for which every comparison is False
        fault = "larger than float32 holds" if all(map(math.isfinite, values)) else "not finite"
        return trajectory.replace(error=f"advantage: {values if of_turns else values[0]} is {fault}")
    if not of_turns and share.is_whole:
        return trajectory.replace(advantage=values[0])
    turns = list(trajectory.turns)
    for place, value in zip(share.places, values if of_turns else values * len(share.places), strict=True):
        turns[place] = turns[place].replace(advantage=value)
    return trajectory.replace(turns=tuple(turns))


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError("a string")
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.inf if value > 0 else -math.inf


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, for messages."""
    while isinstance(function, functools.partial | Advantage):
        function = function.function if isinstance(function, Advantage) else function.func
    return getattr(function, "__qualname__", type(function).__qualname__)
