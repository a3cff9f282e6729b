"""Reads the reward of an episode from what a program wrote or posted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import EnvironmentFault
from verbatim.rollouts.rewards import read_score


def read_reward(line: str, where: str) -> float | Mapping[str, float]:
    """The reward in a line: a number, `{"reward": number}`, or `{"reward": {part: number}}`, beside other keys.

    Raises:
        EnvironmentFault: there is none.

    >>> read_reward('{"reward": {"right": 1, "short": 0.5}, "guesses": 3}', "the last line")
    {'right': 1.0, 'short': 0.5}
    """
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        value = line
    if isinstance(value, Mapping):
        value = value.get("reward")
    if value is None or value == {} or isinstance(value, bool | str | list):
        raise EnvironmentFault(
            f"program: {where} has no reward: found {line[-200:]!r}, expected a number, "
            '{"reward": number} or {"reward": {part: number}}'
        )
    reward, parts = read_score(value, f"program: {where}")
    assert reward is not None
    return parts or reward
