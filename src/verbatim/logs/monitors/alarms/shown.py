"""Which trajectories of a step show an alarm: those of its environment in order, the clearest first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from verbatim.core.records.equality import is_at_least
from verbatim.core.trajectories import Fate, first_version
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.logs.monitors.alarms.base import TOOL, Sight
from verbatim.logs.monitors.alarms.figures import (
    LOOKED_AT,
    calls_of,
    looks_like_a_call,
    main_reason,
    own_breaks,
    repetition,
    tokens_per_turn,
)
from verbatim.rollouts.loop import TOOLS_OFFERED
from verbatim.rollouts.tally import failure_kind


def furthest(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those whose logprobs differ most between trainer and sampler, by the mean over their tokens."""
    known = [(moved, fate) for fate in fates if (moved := _moved(fate)) is not None]
    return [fate for _, fate in sorted(known, key=lambda pair: -pair[0])]


def _moved(fate: Fate) -> float | None:
    pairs = zip(fate.trainer_logprobs, fate.trajectory.turns, strict=False)
    moved = [
        np.abs(trainer - turn.logprobs)
        for trainer, turn in pairs
        if trainer is not None and turn.logprobs is not None and len(turn.logprobs)
    ]
    return float(np.concatenate(moved).mean()) if moved else None


def oldest(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those that the oldest policy sampled."""
    return sorted(
        (fate for fate in fates if fate.trajectory.turns), key=lambda fate: first_version(fate.trajectory) or 0
    )


def without_a_call(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those that were offered tools and called none, first those whose text looks like a call."""
    found = [
        fate
        for fate in fates
        if fate.trajectory.error is None
        and fate.trajectory.info.get(TOOLS_OFFERED)
        and not any(call.status == "ok" for turn in fate.trajectory.turns for call in turn.tool_calls)
    ]
    return sorted(found, key=lambda fate: not looks_like_a_call(fate.trajectory))


def broken(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those with most turns that break."""
    own = [fate for fate in fates if fate.trajectory.error is None][:LOOKED_AT]
    counts = {id(fate): own_breaks(fate.trajectory)[1] for fate in own}
    return sorted((fate for fate in own if counts[id(fate)]), key=lambda fate: -counts[id(fate)])


def untrained(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those that are not trained, for the sight's reason where it has one."""
    reason = sight.values.get("reason")
    return [fate for fate in fates if (why := main_reason(fate)) is not None and reason in (None, why)]


def failed(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those that failed with the sight's kind of error."""
    named = ((fate, fate.trajectory.error) for fate in fates)
    return [fate for fate, error in named if error is not None and failure_kind(error) == sight.values["kind"]]


def paid_without_success(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those with the highest rewards below 1, or with the highest ones where there are none."""
    paid = [(fate.trajectory.reward, fate) for fate in fates if fate.trajectory.reward is not None]
    return [fate for _, fate in sorted(paid, key=lambda pair: (is_at_least(pair[0], 1.0), -pair[0]))]


def most_of(fates: Sequence[Fate], sight: Sight) -> list[Fate]:
    """Those with most of the sight's figure among those that earned at least the median."""
    own = (fate for fate in fates if fate.trajectory.error is None)
    paid = [(fate.trajectory.reward, fate) for fate in own if fate.trajectory.reward is not None]
    middle = statistics.median([reward for reward, _ in paid] or [0.0])
    measures: dict[str, Callable[[TrajectoryRecord], float]] = {
        "tokens_per_turn": tokens_per_turn,
        "repetition": lambda trajectory: repetition(trajectory) or 0.0,
        TOOL: lambda trajectory: calls_of(trajectory)[sight.values["tool"]],
    }
    found = [fate for reward, fate in paid if reward >= middle][:LOOKED_AT]
    return sorted(found, key=lambda fate: -measures[sight.why](fate.trajectory))
