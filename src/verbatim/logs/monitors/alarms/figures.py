"""Measures the behaviour, outcomes and rewards of a step's rollouts for each environment, and selects the rollouts that
show the problem of an alarm."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from verbatim.core.records.equality import deviation, is_at_least
from verbatim.core.trajectories import TRAINED, TrajectoryOutcome, first_version
from verbatim.core.trajectories.openings import breaks
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.types import StopReason
from verbatim.logs.monitors.alarms.rule import TOOL, UNTRAINED, Sight
from verbatim.rollouts.episode_stats import failure_kind
from verbatim.rollouts.loop import TOOLS_OFFERED

LOOKED_AT = 128
"""Maximum number of trajectories per environment whose tokens and texts are read, to limit the time."""
_TOKENS = 512
"""Repetition is measured in this number of tokens at the end of a turn."""
_TOOLS = 32
"""Maximum number of tools per environment that have figures. The tools that are called most are kept."""
_KINDS = 5
"""Maximum number of kinds of errors that are kept per environment. The most common kinds are kept."""
_LIKE_A_CALL = re.compile(
    r"<tool_call|<\|?tool_?calls?|<function|<invoke|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|[\"'](arguments|parameters)[\"']\s*:"
)
"""Matches text that looks like a tool call in one of the common formats."""


def rollout_figures(metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> dict[str, dict[str, float]]:
    """Figures by environment and name. Means over no values are left out. The names:

    - `rollouts`, `failed`, `completed`, `trained`: numbers of all rollouts, of rollouts that failed, of rollouts that
      did not fail, and of rollouts with a trained token; `untrained/{reason}`: number of rollouts without a trained
      token, by reason
    - `success`: the metric; `full_reward`: share of rollouts with a reward of at least 1, which equals `success` if the
      environment does not define success
    - `reward`, `turns`, `completion_tokens`, `tokens_per_turn`, `tool/{name}` (calls of this tool): means over the
      completed rollouts; `reward_std`: standard deviation; `truncated`: share that ended at a length limit
    - `repetition`: share of 4-grams that have occurred before in the same turn
    - `credit/tokens_per_turn`, `credit/repetition`, `credit/tool/{name}`: correlation with the reward within groups
    - `offered`: number of rollouts that were offered tools; among these rollouts, `called`: share with a readable call;
      `unread`: share of the turns whose calls are all unreadable; `call_like`: share without a readable call whose text
      looks like a call
    - `later_turns`: number of turns after the first turn of the agent that spoke first; `broken`: share of these turns
      that break; `rewritten`: share of these turns that break and lose at least half of the previous completion
    """
    found = {}
    for env in dict.fromkeys(outcome.trajectory.env for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.trajectory.env == env]
        completed = [outcome.trajectory for outcome in own if outcome.trajectory.error is None]
        figures = {
            **_outcome_figures(own),
            "success": metrics.get(f"success/{env}", math.nan),
            **_behaviour_figures(completed),
            **_tool_figures(completed),
            **_break_figures(completed[:LOOKED_AT]),
        }
        found[env] = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
    return found


def error_counts(outcomes: Sequence[TrajectoryOutcome]) -> dict[str, dict[str, int]]:
    """Number of failed rollouts by environment and kind of error, which is the message without numbers and quoted
    values."""
    failed = [
        (outcome.trajectory.env, outcome.trajectory.error)
        for outcome in outcomes
        if outcome.trajectory.error is not None
    ]
    kinds = {env: Counter[str]() for env, _ in failed}
    for env, error in failed:
        kinds[env][failure_kind(error)] += 1
    return {env: dict(counts.most_common(_KINDS)) for env, counts in kinds.items()}


def main_reason(outcome: TrajectoryOutcome) -> str | None:
    """The reason why no token of a trajectory was trained; None if at least one was trained."""
    tokens = outcome.num_tokens
    if tokens.get(TRAINED):
        return None
    return outcome.reason or max(tokens, key=lambda reason: tokens[reason], default="empty")


def repetition(trajectory: TrajectoryRecord) -> float | None:
    """The share of a trajectory's 4-grams that occurred before in the same turn; None if there are no 4-grams.

    Example: the turn 1 2 3 4 1 2 3 4 has five 4-grams, of which the last occurred before, so the result is 0.2.
    """
    pieces = [turn.completion_ids[-_TOKENS:].tolist() for turn in trajectory.turns]
    grams = [list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False)) for ids in pieces]
    total = sum(map(len, grams))
    return 1 - sum(len(set(own)) for own in grams) / total if total else None


class Groups:
    """Computes correlations with the reward within groups, from the rewards and groups of trajectories."""

    def __init__(self, trajectories: Sequence[TrajectoryRecord]) -> None:
        self._rewards = np.array([t.reward for t in trajectories], dtype=np.float64)  # converts None to NaN
        _, self._group_of = np.unique([t.group_id for t in trajectories], return_inverse=True)

    def credit(self, values: Sequence[float | None]) -> float:
        """The correlation of a value with the reward, after each group's mean is subtracted from both the value and the
        reward. NaN if the value or the reward is constant within all groups, or if there are no values. Trajectories
        without a value or reward are ignored.

        Example: two groups have rewards 0, 1 and 4, 5, and values 2, 4 and 9, 7. The value rises with the reward in one
        group and falls in the other, so the correlation is 0, although it would be 0.92 over all four trajectories.
        """
        given = np.array(values, dtype=np.float64)
        kept = np.isfinite(self._rewards) & np.isfinite(given)
        groups = self._group_of[kept]
        sizes = np.maximum(np.bincount(groups), 1)
        value, reward = (own - (np.bincount(groups, own) / sizes)[groups] for own in (given[kept], self._rewards[kept]))
        spread = math.sqrt(float((value**2).sum() * (reward**2).sum()))
        return float((value * reward).sum()) / spread if spread > 1e-12 else math.nan


def calls_of(trajectory: TrajectoryRecord) -> Counter[str]:
    """Number of calls by tool name as the model wrote it. Calls with invalid arguments count too."""
    return Counter(call.name for turn in trajectory.turns for call in turn.tool_calls if call.name is not None)


def tokens_per_turn(trajectory: TrajectoryRecord) -> float:
    """Mean number of sampled tokens per turn; 0 if there are no turns."""
    return trajectory.num_sampled_tokens / max(1, len(trajectory.turns))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else math.nan


def _outcome_figures(outcomes: Sequence[TrajectoryOutcome]) -> dict[str, float]:
    reasons = Counter(main_reason(outcome) for outcome in outcomes)
    completed = [outcome for outcome in outcomes if outcome.trajectory.error is None]
    rewards = [reward for outcome in completed if math.isfinite(reward := _reward(outcome))]
    in_batch = [
        outcome for outcome in completed if outcome.reason not in _BEFORE_A_BATCH and math.isfinite(_reward(outcome))
    ]
    return {
        "rollouts": len(outcomes),
        "failed": len(outcomes) - len(completed),
        "completed": len(completed),
        "trained": reasons.pop(None, 0),
        **{f"{UNTRAINED}{reason}": count for reason, count in reasons.items()},
        "reward": _mean(rewards),
        "reward_std": deviation(rewards) if rewards else math.nan,
        "full_reward": _mean(is_at_least(_reward(outcome), 1.0) for outcome in in_batch),
    }


_BEFORE_A_BATCH = ("difficulty", "stale")
"""Reasons for which rollouts are dropped before a batch is built. The metric `success` does not include such
rollouts."""


def _reward(outcome: TrajectoryOutcome) -> float:
    return math.nan if outcome.trajectory.reward is None else outcome.trajectory.reward


def _behaviour_figures(completed: Sequence[TrajectoryRecord]) -> dict[str, float]:
    per_turn, looked_at = [tokens_per_turn(t) for t in completed], completed[:LOOKED_AT]
    repeated = [repetition(t) for t in looked_at]
    return {
        "turns": _mean(len(t.turns) for t in completed),
        "completion_tokens": _mean(t.num_sampled_tokens for t in completed),
        "tokens_per_turn": _mean(per_turn),
        "credit/tokens_per_turn": Groups(completed).credit(per_turn),
        "truncated": _mean(t.stop_reason is StopReason.LENGTH for t in completed),
        "repetition": _mean(value for value in repeated if value is not None),
        "credit/repetition": Groups(looked_at).credit(repeated),
    }


def _tool_figures(completed: Sequence[TrajectoryRecord]) -> dict[str, float]:
    calls, groups = [calls_of(t) for t in completed], Groups(completed)
    figures: dict[str, float] = {}
    for name, _ in sum(calls, Counter[str]()).most_common(_TOOLS):
        own = [float(counts[name]) for counts in calls]
        figures |= {f"{TOOL}{name}": _mean(own), f"credit/{TOOL}{name}": groups.credit(own)}
    offered = [t for t in completed if t.info.get(TOOLS_OFFERED) or any(turn.tool_calls for turn in t.turns)]
    if not offered:
        return figures
    turns = [turn.tool_calls for t in offered for turn in t.turns]
    silent = [t for t in offered if not any(_is_readable(turn.tool_calls) for turn in t.turns)]
    like = _mean(looks_like_a_call(t) for t in silent[:LOOKED_AT]) if silent else 0.0
    return {
        **figures,
        "offered": len(offered),
        "called": 1 - len(silent) / len(offered),
        "unread": _mean(bool(calls) and not _is_readable(calls) for calls in turns),
        "call_like": like * len(silent) / len(offered),
    }


def _is_readable(calls: Iterable[object]) -> bool:
    """True if a turn has a call whose name can be read, even if there is no such tool or the arguments are invalid."""
    return any(getattr(call, "name", None) is not None for call in calls)


def looks_like_a_call(trajectory: TrajectoryRecord) -> bool:
    """True if the assistant's text contains something like a tool call in one of the common formats."""
    texts = (message.get("content") for message in trajectory.messages if message.get("role") == "assistant")
    return any(isinstance(text, str) and _LIKE_A_CALL.search(text) is not None for text in texts)


def _break_figures(completed: Sequence[TrajectoryRecord]) -> dict[str, float]:
    found = [own_breaks(trajectory) for trajectory in completed]
    later, broken, rewritten = (sum(counts[place] for counts in found) for place in range(3))
    if not later:
        return {"later_turns": 0.0}
    return {"later_turns": later, "broken": broken / later, "rewritten": rewritten / later}


def own_breaks(trajectory: TrajectoryRecord) -> tuple[int, int, int]:
    """For the agent that spoke first: the number of its turns after the first, the number of these turns that break,
    and the number of these turns that break and lose or change at least half of the previous completion.

    Other agents are ignored, because their conversations may start from scratch at each call.
    """
    own = [place for place, turn in enumerate(trajectory.turns) if turn.agent == trajectory.turns[0].agent]
    breaking, broken, rewritten = set(breaks(trajectory.turns)), 0, 0
    for before, turn in ((trajectory.turns[a], trajectory.turns[b]) for a, b in pairwise(own) if b in breaking):
        kept = min(turn.num_prompt_tokens, turn.path.shared_with(before.path))
        broken += 1
        rewritten += 2 * (before.path.length - kept) >= len(before.completion_ids)
    return max(0, len(own) - 1), broken, rewritten


# -- select the outcomes that show an alarm's problem; those that show it most clearly come first


def furthest(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes in descending order of the difference in logprobs between trainer and sampler, averaged over tokens."""
    known = [(moved, outcome) for outcome in outcomes if (moved := _moved(outcome)) is not None]
    return [outcome for _, outcome in sorted(known, key=lambda pair: -pair[0])]


def _moved(outcome: TrajectoryOutcome) -> float | None:
    moved = [
        np.abs(trainer - turn.logprobs)
        for trainer, turn in zip(outcome.trainer_logprobs, outcome.trajectory.turns, strict=False)
        if trainer is not None and turn.logprobs is not None and len(turn.logprobs)
    ]
    return float(np.concatenate(moved).mean()) if moved else None


def oldest(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes in ascending order of the policy version that sampled them, the oldest first."""
    return sorted(
        (outcome for outcome in outcomes if outcome.trajectory.turns),
        key=lambda outcome: first_version(outcome.trajectory) or 0,
    )


def without_a_call(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes that were offered tools but have no valid call. Outcomes whose text looks like a call come first."""
    found = [
        outcome
        for outcome in outcomes
        if outcome.trajectory.error is None
        and outcome.trajectory.info.get(TOOLS_OFFERED)
        and not any(call.status == "ok" for turn in outcome.trajectory.turns for call in turn.tool_calls)
    ]
    return sorted(found, key=lambda outcome: not looks_like_a_call(outcome.trajectory))


def broken(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes whose trajectories have breaks, sorted by number of breaks, largest first."""
    own = [outcome for outcome in outcomes if outcome.trajectory.error is None][:LOOKED_AT]
    counted = sorted(((own_breaks(outcome.trajectory)[1], outcome) for outcome in own), key=lambda pair: -pair[0])
    return [outcome for count, outcome in counted if count]


def untrained(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes without a trained token. If the sight has a reason, only the outcomes with this reason."""
    reason = sight.values.get("reason")
    return [outcome for outcome in outcomes if (why := main_reason(outcome)) is not None and reason in (None, why)]


def failed(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes that failed with the sight's kind of error."""
    kind = sight.values["kind"]
    return [
        outcome
        for outcome in outcomes
        if (error := outcome.trajectory.error) is not None and failure_kind(error) == kind
    ]


def paid_without_success(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes with rewards below 1, then outcomes with rewards of at least 1; each part is sorted by reward, highest
    first."""
    paid = [(outcome.trajectory.reward, outcome) for outcome in outcomes if outcome.trajectory.reward is not None]
    return [outcome for _, outcome in sorted(paid, key=lambda pair: (is_at_least(pair[0], 1.0), -pair[0]))]


def most_of(outcomes: Sequence[TrajectoryOutcome], sight: Sight) -> list[TrajectoryOutcome]:
    """Outcomes that earned at least the median reward, in descending order of the sight's figure."""
    own = (outcome for outcome in outcomes if outcome.trajectory.error is None)
    paid = [(outcome.trajectory.reward, outcome) for outcome in own if outcome.trajectory.reward is not None]
    middle = statistics.median([reward for reward, _ in paid] or [0.0])
    measures: dict[str, Callable[[TrajectoryRecord], float]] = {
        "tokens_per_turn": tokens_per_turn,
        "repetition": lambda trajectory: repetition(trajectory) or 0.0,
        TOOL: lambda trajectory: calls_of(trajectory)[sight.values["tool"]],
    }
    found = [outcome for reward, outcome in paid if reward >= middle][:LOOKED_AT]
    return sorted(found, key=lambda outcome: -measures[sight.why](outcome.trajectory))
