"""Checks that the rewards of tools and environments are finite numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import EnvironmentFault
from verbatim.core.texts import error_text, shown
from verbatim.environments.environment import AgentScores

LARGEST = 3.4028234663852886e38
"""The largest float32. Advantages are float32, so a larger reward would become infinite."""
MOST_PARTS = 1000
"""Maximum number of parts in a score. There is a limit because each part becomes a metric."""


def checked_reward(reward: Any, who: str) -> float | None:
    """Return a turn's reward as a float, or None if the turn has no reward. Raises EnvironmentFault if the reward is
    not a finite number in float32; `who` names the reward's source in the error."""
    if reward is None:
        return None
    try:
        fits = isinstance(reward, numbers.Real) and abs(float(reward)) <= LARGEST  # False for NaN
    except Exception:  # noqa: BLE001  an integer too large for a float; a user's own number may raise anything
        fits = False
    if not fits:
        raise EnvironmentFault(f"{who} gave the reward {shown(reward, 80)}; {_expected(reward)}")
    return float(reward)


def add_reward(so_far: float | None, reward: Any, who: str) -> float | None:
    """Add the reward of a tool call to the sum over the turn's earlier calls, and return the new sum; None if no call
    has given a reward. The sum is checked too, since it may overflow float32."""
    more = checked_reward(reward, who)
    if more is None or so_far is None:
        return so_far if more is None else more
    return checked_reward(so_far + more, f"{who}, with the calls before it,")


def read_score(score: Any, who: str) -> tuple[float | None, dict[str, float]]:
    """Read the result of `score`. Return (reward, named parts). Raises EnvironmentFault if any of these is not a finite
    number in float32, or if there are too many parts."""
    if score is None:
        return None, {}
    if isinstance(score, Mapping) and len(score) > MOST_PARTS:
        raise EnvironmentFault(f"{who} returned {len(score):,} parts; expected at most {MOST_PARTS:,}")
    try:
        pairs = [(str(name), _one_number(value)) for name, value in score.items()] if isinstance(score, Mapping) else []
        parts = dict(pairs)
        # `fsum` is exact, so the reward does not depend on the order of the parts.
        reward = math.fsum(parts.values()) if isinstance(score, Mapping) else _one_number(score)
    except Exception as error:  # noqa: BLE001  a user's own number may raise anything
        said = error_text(error).partition(": ")[2]
        raise EnvironmentFault(
            f"{who} returned {shown(score)}; expected a number or {{part: number}} ({shown(said)[1:-1]})"
        ) from None
    if len(parts) < len(pairs):
        raise EnvironmentFault(
            f"{who} returned {shown(score)}; two of its names are equal as strings; expected distinct names"
        )
    if not all(abs(number) <= LARGEST for number in (reward, *parts.values())):
        raise EnvironmentFault(f"{who} returned {shown(score)}; {_expected(reward)}")
    return reward, parts


def read_agent_scores(score: Any, who: str) -> tuple[float | None, dict[str, float], dict[str, float]]:
    """Read the result of `score`. Return (reward, named parts, rewards of single agents). Raises EnvironmentFault as
    `read_score` does."""
    if not isinstance(score, AgentScores):
        return (*read_score(score, who), {})
    if not isinstance(score.agents, Mapping) or not score.agents:
        raise EnvironmentFault(f"{who} returned AgentScores(agents={shown(score.agents)}); expected {{agent: number}}")
    _, agents = read_score(score.agents, f"{who}, for the agents,")
    reward = math.fsum(agents.values()) / len(agents) if score.reward is None else score.reward
    return (*read_score(reward, who), agents)


def checked_number(value: Any, who: str) -> float:
    """Return a required reward as a float. Raises EnvironmentFault if the reward is missing, and also as `read_score`
    does."""
    reward, _ = read_score(shown(value, 80) if isinstance(value, Mapping) else value, who)
    if reward is None:
        raise EnvironmentFault(f"{who} returned None; expected a finite number")
    return reward


def _one_number(value: Any) -> float:
    """Convert a number of any kind, also numpy's and torch's, to a float. Strings are refused, even "1.0", because
    `float()` would accept them silently."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{shown(value, 80)} is a string: write float(...) around it if it is meant as a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("it is larger than any float") from error


def _expected(reward: Any) -> str:
    try:
        too_large = isinstance(reward, numbers.Real) and math.isfinite(reward)
    except OverflowError:
        too_large = True
    except Exception:  # noqa: BLE001  a user's own number may raise anything
        too_large = False
    return f"expected at most {LARGEST:.1e}, all that float32 holds" if too_large else "expected a finite number"
