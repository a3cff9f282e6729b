"""The rewards that a tool or an environment gives, as finite numbers."""

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


def one_number(value: Any) -> float:
    """What `score` returned, or a part of it: any kind of number, numpy's and torch's included, as a float.

    Raises:
        TypeError: a text, even one that reads like a number; a list; None.
        ValueError: an array of several, or more than a float can hold.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.80} is a text: write float(...) around it if it is meant as a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("it is larger than any float") from error
