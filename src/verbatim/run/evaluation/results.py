"""Computes the results of one policy on one environment, overall and by example."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verbatim.core.records.equality import deviation
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.intervals import UNKNOWN, ByExample, Estimate, mean_interval, share_interval
from verbatim.run.evaluation.pass_at_k import pass_at_k, pass_hat_k, powers_up_to


@dataclass(frozen=True, kw_only=True)
class ExampleResult:
    """The result on one example."""

    example_id: str
    num_episodes: int
    num_failed: int
    num_successes: int
    mean_reward: float
    """The mean reward of the episodes that have a reward; NaN if no episode has a reward."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """pass@k by k."""
    first_error: str | None = None
    """The error of the first failed episode."""

    @property
    def success(self) -> float:
        """The share of the example's episodes that succeeded."""
        return self.num_successes / self.num_episodes


@dataclass(frozen=True, kw_only=True)
class EnvResult:
    """The result of one policy on one environment."""

    env: str
    num_episodes: int
    num_failed: int
    """Number of episodes that ended with an error. They count as failures, and are left out of rewards and of
    `figures`."""
    success: Estimate = UNKNOWN
    """The share of all episodes that reached their goal."""
    reward: Estimate = UNKNOWN
    """The mean reward of the episodes that have a reward."""
    reward_std: float = math.nan
    """The standard deviation of the rewards."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """pass@k by k, averaged over examples."""
    pass_hat: Mapping[int, Estimate] = field(default_factory=dict)
    """pass^k by k, averaged over examples."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means over the completed episodes: `turns`, `completion_tokens`, `valid_format`, ..."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Totals, including failed episodes: `completion_tokens`, `prompt_tokens`, `judge/cost`, ..."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Number of failed episodes by the first word of their error: `environment`, `api`, `timeout`, ..."""
    examples: Sequence[ExampleResult] = ()

    @property
    def episodes_each(self) -> str:
        """The number of episodes per example, as text: "4", or "3-4" if the number varies."""
        counts = [example.num_episodes for example in self.examples]
        low, high = min(counts, default=0), max(counts, default=0)
        return str(low) if low == high else f"{low}-{high}"

    def metrics(self) -> dict[str, float]:
        """The result under the names used in metrics.jsonl."""
        return {
            "reward/mean": self.reward.value,
            "reward/std": self.reward_std,
            "success": self.success.value,
            **self.figures,
            # Of the totals only the judge's: `completion_tokens` is already the name of a mean in `figures`.
            **{name: value for name, value in self.spent.items() if name.startswith("judge/")},
            "success/low": self.success.low,
            "success/high": self.success.high,
            "reward/low": self.reward.low,
            "reward/high": self.reward.high,
            "examples": len(self.examples),
            "episodes": self.num_episodes,
            "failed": self.num_failed,
        }


def env_result(env: str, outcomes: Iterable[EvaluatedEpisode], *, ks: Sequence[int] | None = None) -> EnvResult:
    """The result of these episodes.

    Args:
        env: The environment's label.
        outcomes: The episodes in any order; examples keep the order in which they appear.
        ks: The values of k for pass@k and pass^k; None for 1, 2, 4 and 8. Values above the smallest number of episodes
            per example are left out.
    """
    listed = list(outcomes)
    groups: dict[str, list[EvaluatedEpisode]] = {}
    for outcome in listed:
        groups.setdefault(outcome.example_id, []).append(outcome)
    # pass@k and pass^k can be estimated only from at least k episodes of every example.
    attempts = min(map(len, groups.values()), default=0)
    asked = (powers_up_to(attempts) if attempts else ()) if ks is None else [k for k in ks if k <= attempts]
    rewards = [outcome.reward for outcome in listed if outcome.reward is not None]
    failed = [outcome.error for outcome in listed if outcome.error is not None]
    return EnvResult(
        env=env,
        num_episodes=len(listed),
        num_failed=len(failed),
        success=share_interval(successes(listed)),
        reward=mean_interval(rewards_of(listed)),
        reward_std=std(rewards),
        pass_at={k: _over_examples(groups, pass_at_k, k) for k in asked},
        pass_hat={k: _over_examples(groups, pass_hat_k, k) for k in asked},
        figures=means(listed),
        spent=totals(listed),
        failures=dict(Counter(error.partition(":")[0] for error in failed).most_common()),
        examples=tuple(_example(example_id, group, asked) for example_id, group in groups.items()),
    )


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if there are no values."""
    # `fsum` is exact, so the mean does not depend on the order in which the episodes ended.
    return math.fsum(values) / len(values) if values else math.nan


def std(values: Sequence[float]) -> float:
    """The population standard deviation; NaN if there are no values."""
    return deviation(values) if values else math.nan


def successes(outcomes: Iterable[EvaluatedEpisode]) -> ByExample:
    """1 for each episode that succeeded and 0 for each other episode, by example."""
    return _by_example(outcomes, lambda outcome: float(outcome.success))


def rewards_of(outcomes: Iterable[EvaluatedEpisode]) -> ByExample:
    """The rewards of the episodes that have a reward, by example."""
    return _by_example(outcomes, lambda outcome: outcome.reward)


def _by_example(
    outcomes: Iterable[EvaluatedEpisode], value_of: Callable[[EvaluatedEpisode], float | None]
) -> ByExample:
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        value = value_of(outcome)
        if value is not None:
            found.setdefault(outcome.example_id, []).append(value)
    return found


def _over_examples(
    groups: Mapping[str, Sequence[EvaluatedEpisode]], estimate: Callable[[int, int, int], float], k: int
) -> Estimate:
    # One value between 0 and 1 for each example. `mean_interval` could leave this range.
    return share_interval(
        {
            example_id: [estimate(len(group), sum(outcome.success for outcome in group), k)]
            for example_id, group in groups.items()
        }
    )


def _example(example_id: str, group: Sequence[EvaluatedEpisode], ks: Sequence[int]) -> ExampleResult:
    rewards = [outcome.reward for outcome in group if outcome.reward is not None]
    errors = [outcome.error for outcome in group if outcome.error is not None]
    won = sum(outcome.success for outcome in group)
    return ExampleResult(
        example_id=example_id,
        num_episodes=len(group),
        num_failed=len(errors),
        num_successes=won,
        mean_reward=mean(rewards),
        pass_at={k: pass_at_k(len(group), won, k) for k in ks},
        first_error=errors[0] if errors else None,
    )


def means(outcomes: Sequence[EvaluatedEpisode]) -> dict[str, float]:
    """The means over the completed episodes. `reward_part/{part}` and `agent_reward/{agent}` get `/mean` and `/std`.
    `valid_format` is a share of all turns with tool calls, not a mean over episodes; it is absent if no turn has tool
    calls."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.figures.items():
            values.setdefault(name, []).append(value)
    found: dict[str, float] = {}
    for name, each in values.items():
        if name.partition("/")[0] in ("reward_part", "agent_reward"):
            found |= {f"{name}/mean": mean(each), f"{name}/std": std(each)}
        else:
            found[name] = mean(each)
    valid, of = (sum(outcome.tool_turns[i] for outcome in outcomes) for i in (0, 1))
    return found | ({"valid_format": valid / of} if of else {})


def totals(outcomes: Sequence[EvaluatedEpisode]) -> dict[str, float]:
    """The values of `spent` (tokens, requests, judge calls), summed over all episodes."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.spent)
    return dict(total)
