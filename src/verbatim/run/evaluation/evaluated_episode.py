"""Defines the result of an evaluated episode: a small record, made from a trajectory or from its JSON in a log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.records.equality import is_at_least
from verbatim.core.types import StopReason, Trajectory
from verbatim.environments.environment import IS_SUCCESS
from verbatim.rollouts.loop import JUDGE_USAGE

USAGE = "usage"
"""The key of `Trajectory.info` with a chat server's own token counts."""

FIGURES = ("turns", "tool_calls", "tool_errors", "truncated", "malformed", "completion_tokens")
"""Names of the figures that every completed episode has."""

_Json = Mapping[str, Any]

Key = tuple[str, int, int | None]
"""The key of an episode: example id, sample index and seed. Episodes of two policies with the same key are compared as
a pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedEpisode:
    """One evaluated episode, without its tokens and messages."""

    env: str
    example_id: str
    sample_index: int
    """The index of the episode among the episodes of its example."""
    seed: int | None
    success: bool
    """True if the episode reached its goal. An episode that ended with an error counts as False."""
    reward: float | None
    """The episode's reward; None if the episode failed or was given no reward."""
    error: str | None
    """The error; None if the episode completed."""
    stop_reason: str | None
    figures: Mapping[str, float] = field(default_factory=dict)
    """Values that are averaged over completed episodes: `turns`, `completion_tokens`, `reward_part/{part}`, ..."""
    tool_turns: tuple[int, int] = (0, 0)
    """(1) Number of turns whose tool calls were all well-formed and valid, and (2) number of turns with a tool call."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Values that are summed over all episodes, including failed episodes: tokens, repeated requests, judge calls."""

    @property
    def key(self) -> Key:
        """The key by which the same episode is found under another policy."""
        return self.example_id, self.sample_index, self.seed


def evaluated_episode_of(trajectory: Trajectory, success: bool) -> EvaluatedEpisode:
    """The result of a finished trajectory and its environment's verdict."""
    turns = [
        {
            "tool_calls": turn.tool_calls,
            "completion_ids": turn.completion_ids,
            "trained": turn.trained,
            "parse_status": turn.parse_status,
        }
        for turn in trajectory.turns
    ]
    return evaluated_episode_from_json({**vars(trajectory), "turns": turns}, success)


def evaluated_episode_from_json(record: Mapping[str, Any], success: bool | None = None) -> EvaluatedEpisode:
    """The result of a trajectory in a log.

    Args:
        record: The trajectory as written by `trajectory_to_json`.
        success: The environment's verdict. If None, the verdict in `info` is used; if `info` has no verdict, a reward
            of at least 1 counts as success.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the record is not a trajectory.
    """
    error, turns, info = record["error"], record["turns"], record["info"]
    reward = None if record["reward"] is None else float(record["reward"])
    stop_reason = record["stop_reason"]
    if success is None:
        success = bool(info[IS_SUCCESS]) if IS_SUCCESS in info else reward is not None and is_at_least(reward, 1.0)
    failed = error is not None
    calling = [turn for turn in turns if turn["trained"] and turn["tool_calls"] and not failed]
    has_reward = reward is not None and math.isfinite(reward) and not failed
    return EvaluatedEpisode(
        env=str(record["env"]),
        example_id=str(record["example_id"]),
        sample_index=int(record["sample_index"]),
        seed=record["seed"],
        success=bool(success) and not failed and stop_reason != StopReason.MALFORMED,
        reward=reward if has_reward else None,
        error=error,
        stop_reason=stop_reason,
        figures={} if failed else _figures(record, turns, info),
        tool_turns=(sum(turn["parse_status"] == "ok" for turn in calling), len(calling)),
        spent=_spent(record, turns, info),
    )


def _figures(record: _Json, turns: Sequence[_Json], info: _Json) -> dict[str, float]:
    return {
        "turns": len(turns) + record["num_unrecorded_turns"],
        "tool_calls": sum(len(turn["tool_calls"]) for turn in turns),
        "tool_errors": sum(info.get("tool_errors", {}).values()),
        "truncated": float(record["truncated"]),
        "malformed": float(record["stop_reason"] == StopReason.MALFORMED),
        "completion_tokens": _num_sampled(record, turns, info),
        **{f"reward_part/{name}": float(value) for name, value in record["reward_parts"].items()},
        **{f"agent_reward/{name}": float(value) for name, value in record["agent_rewards"].items()},
    }


def _num_sampled(record: _Json, turns: Sequence[_Json], info: _Json) -> int:
    """The recorded number of sampled tokens. For a server that returns no ids, it is the number that the server
    counted."""
    recorded = sum(len(turn["completion_ids"]) for turn in turns) + record["num_unrecorded_tokens"]
    return recorded or int(_counts(info.get(USAGE)).get("completion_tokens", 0))


def _spent(record: _Json, turns: Sequence[_Json], info: _Json) -> dict[str, float]:
    usage = _counts(info.get(USAGE))
    spent: Counter[str] = Counter({"completion_tokens": _num_sampled(record, turns, info)})
    if usage:
        spent["prompt_tokens"] = usage.get("prompt_tokens", 0)
        spent["requests_repeated"] = sum(_counts(info.get("request_errors")).values())
    spent.update({f"judge/{name}": count for name, count in _counts(info.get(JUDGE_USAGE)).items()})
    return dict(spent)


def _counts(found: Any) -> Mapping[str, Any]:
    """The entries of a mapping that are numbers. Environments write into `info` too, so any value may be there."""
    if not isinstance(found, Mapping):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
