"""The reward that a tool or an environment gives to a turn."""

from __future__ import annotations

import math
import numbers
from typing import Any

from verbatim.errors import EnvironmentFault


def checked_reward(reward: Any, who: str) -> float | None:
    """A turn's own reward; None where there is none.

    Raises:
        EnvironmentFault: it is no finite number; fails the trajectory.
    """
    if reward is None:
        return None
    try:
        finite = isinstance(reward, numbers.Real) and math.isfinite(reward)
    except OverflowError:  # an integer that no float can hold
        finite = False
    if not finite:
        raise EnvironmentFault(f"{who} gave the reward {reward!r:.80}; expected a finite number")
    return float(reward)


def add_reward(so_far: float | None, reward: Any, who: str) -> float | None:
    """What the calls of one turn have earned together, after one more; None while none of them has earned anything.

    Raises:
        EnvironmentFault: as `checked_reward`, of the reward or of the sum.
    """
    more = checked_reward(reward, who)
    if more is None or so_far is None:
        return so_far if more is None else more
    return checked_reward(so_far + more, f"{who}, with the calls before it,")
