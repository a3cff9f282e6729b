"""Turns groups into batches (credit, filters, samples) and computes their metrics. Every sampled token ends up in a
sample or is counted as dropped."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.algorithms.credit import AdvantageFunction, assign_advantages
from verbatim.algorithms.filters import Filter, apply_filters
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.trajectories import OnBreak, TrajectoryOutcome, age, build
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.types import Group, StopReason, TrainingSample, Trajectory
from verbatim.models.renderers.conversation import BreakReason
from verbatim.rollouts.loop import rendered_again
from verbatim.run.evaluation.evaluated_episode import FIGURES, EvaluatedEpisode, evaluated_episode_of
from verbatim.run.evaluation.results import mean, means, std, totals
from verbatim.run.orchestrator.staleness import age_metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupRules:
    """The rules by which one environment's groups become training samples."""

    advantage: AdvantageFunction
    length_penalty: LengthPenaltyConfig | None = None
    """The length penalty, which changes the rewards from which the advantages are computed."""
    filters: Mapping[str, Filter]
    """Filters by name, in the order in which they are applied."""
    strategy: str
    """A name from `STRATEGIES`."""
    on_break: OnBreak = "split"
    """What to do at a break: start another sample, or stop the run."""
    max_length: int
    """Maximum number of tokens in a sample."""
    max_off_policy_steps: int
    """Maximum staleness of a trained rollout, in steps."""
    needs_logprobs: bool = True
    """True if turns without logprobs serve as context only. False in imitation, which needs no logprobs."""
    needs_rewards: bool = True
    """True if a rollout without a usable reward counts as failed. False with a teacher: such a rollout then gets the
    advantage 0."""
    reads_turn_rewards: bool = True
    """True if the advantage reads the rewards of turns."""
    truncated_sampling: bool = False
    """True if tokens are sampled from a distribution truncated by top-p, top-k or min-p, while the trainer's logprobs
    are of the full distribution."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AssembledGroup:
    """A group with advantages, ready for the trainer."""

    group: Group
    samples: tuple[TrainingSample, ...]
    """The samples to train."""
    outcomes: tuple[TrajectoryOutcome, ...]
    """The outcome of each trajectory, in order, with its advantages."""

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens under the samples' loss masks."""
        return sum(sample.num_trained_tokens for sample in self.samples)

    @property
    def dropped(self) -> dict[str, int]:
        """Number of sampled tokens that are not trained, by reason."""
        dropped: Counter[str] = Counter()
        for outcome in self.outcomes:
            dropped.update(outcome.dropped)
        return dict(dropped)


def assemble_group(group: Group, rules: GroupRules, step: int) -> AssembledGroup:
    """Apply credit, filters and the strategy to a group that is trained in this step.

    Example: for four rollouts with rewards 1, 0, 0 and an error, the first three get the advantages 2/3, -1/3 and -1/3;
    the tokens of the fourth are dropped as `error`.
    """
    credited = _credited(group, rules)
    samples: list[TrainingSample] = []
    outcomes: list[TrajectoryOutcome] = []
    for trajectory in credited.trajectories:
        reason: str | None = None
        flags: tuple[str, ...] = ()
        if trajectory.error is not None:
            reason = "error"
        else:
            verdict = apply_filters(trajectory, rules.filters)
            flags = verdict.flagged
            if age(trajectory, step) > rules.max_off_policy_steps:
                reason = "stale"
            elif verdict.dropped_by is not None:
                reason = f"filter:{verdict.dropped_by}"
        if reason is not None:
            outcomes.append(TrajectoryOutcome.of_dropped(trajectory, reason, flags))
            continue
        built = build(
            trajectory,
            strategy=rules.strategy,
            on_break=rules.on_break,
            max_length=rules.max_length,
            needs_logprobs=rules.needs_logprobs,
        )
        samples.extend(built.samples)
        outcomes.append(dataclasses.replace(built.outcome, flags=flags))
    assembled = AssembledGroup(group=credited, samples=tuple(samples), outcomes=tuple(outcomes))
    sampled = sum(t.num_sampled_tokens for t in credited.trajectories)
    settled = assembled.num_trained_tokens + sum(assembled.dropped.values())
    assert settled == sampled, f"group {group.group_id}: {sampled} tokens sampled, {settled} settled"
    return assembled


def _credited(group: Group, rules: GroupRules) -> Group:
    """The group with advantages. A trajectory for which no advantage can be computed counts as failed, unless rewards
    are not needed."""
    credited = assign_advantages(
        group, rules.advantage, rules.length_penalty, max_length=rules.max_length, needs_logprobs=rules.needs_logprobs
    )
    if rules.needs_rewards:
        return credited
    kept = tuple(
        before if before.error is None and after.error is not None else after
        for before, after in zip(group.trajectories, credited.trajectories, strict=True)
    )
    return dataclasses.replace(credited, trajectories=kept)


def rollout_metrics(
    groups: Sequence[AssembledGroup], step: int, succeeded: Mapping[str, bool], max_off_policy_steps: int = 0
) -> dict[str, float]:
    """The metrics of a batch's rollouts, including filtered and failed rollouts.

    Args:
        groups: The batch.
        step: The batch's number.
        succeeded: True for each trajectory that reached its goal, by trajectory id.
        max_off_policy_steps: Every age up to this number has a metric, even if no rollout has that age.
    """
    everything = [t for g in groups for t in g.group.trajectories]
    completed = [t for t in everything if t.error is None]
    episodes = [evaluated_episode_of(t, succeeded[t.trajectory_id]) for t in everything]
    ended = [episode for episode in episodes if episode.error is None]
    num_failed = len(everything) - len(completed)
    metrics: dict[str, float] = {
        "rollouts": len(everything),
        "rollouts/failed": num_failed,
        "rollouts/failed_share": num_failed / len(everything) if everything else math.nan,
    }
    for kind, count in Counter(t.error.partition(":")[0] for t in everything if t.error).items():
        metrics[f"errors/{kind}"] = count
    metrics |= _earned("", ended)
    metrics |= dict.fromkeys(FIGURES, math.nan)  # these must exist in every step, even without completed rollouts
    metrics |= {name: value for name, value in means(ended).items() if "/" not in name}
    metrics |= {name: value for name, value in totals(episodes).items() if name.startswith("judge/")}
    for env in dict.fromkeys(episode.env for episode in ended):
        own = [episode for episode in ended if episode.env == env]
        metrics |= _earned(f"/{env}", own)
        for name, value in means(own).items():
            kind, part, rest = name.partition("/")
            if part:  # names "kind/part" stand for one part of the reward, or one agent
                metrics[f"{kind}/{env}/{rest}"] = value
    outcomes = [outcome for g in groups for outcome in g.outcomes]
    let_through = [age(outcome.trajectory, step) for outcome in outcomes if outcome.reason not in ("error", "stale")]
    metrics |= age_metrics(let_through, max_off_policy_steps)
    reasons = Counter(outcome.reason for outcome in outcomes)
    metrics["staleness/dropped"] = reasons["stale"]
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.flags):
        metrics[f"filters/{name}/flagged"] = sum(name in outcome.flags for outcome in outcomes)
        metrics[f"filters/{name}/dropped"] = reasons[f"filter:{name}"]
    metrics["samples"] = sum(len(g.samples) for g in groups)
    metrics["breaks"] = sum(t.num_breaks for t in completed)
    metrics.update(break_metrics(completed))
    metrics.update(length_limit_metrics(completed))
    return metrics


def _earned(where: str, ended: Sequence[EvaluatedEpisode]) -> dict[str, float]:
    rewards = [outcome.reward for outcome in ended if outcome.reward is not None]
    return {
        f"reward{where}/mean": mean(rewards),
        f"reward{where}/std": std(rewards),
        f"success{where}": mean([float(outcome.success) for outcome in ended]),
    }


def length_limit_metrics(completed: Sequence[Trajectory]) -> dict[str, float]:
    """`truncated/{reason}`: the share of episodes cut off, for each stop reason; empty if no episode was cut off."""
    counts = Counter(t.stop_reason for t in completed if t.truncated and t.stop_reason is not None)
    return {f"truncated/{reason}": counts[reason] / len(completed) for reason in StopReason if counts[reason]}


def break_metrics(completed: Sequence[Trajectory]) -> dict[str, float]:
    """`breaks/{reason}`: the number of turns whose prompts were rendered from scratch; empty if there are no such
    turns."""
    reasons = Counter(reason for trajectory in completed for _, reason in rendered_again(trajectory.info))
    return {f"breaks/{reason}": float(reasons[reason]) for reason in BreakReason if reasons[reason]}


def kept_set_metrics(groups: Sequence[AssembledGroup]) -> dict[str, float]:
    """`kept_ids/mean` and `kept_ids/max`, over the trained tokens sampled from a truncated distribution, and
    `kept_ids/cut`, the share of these tokens among all trained tokens; empty if nothing was truncated."""
    counts = [sample.kept_sets.counts for g in groups for sample in g.samples if sample.kept_sets is not None]
    if not counts:
        return {}
    sizes = np.concatenate(counts)
    sizes = sizes[sizes > 0]  # 0: the token was sampled from the full distribution
    if not sizes.size:
        return {"kept_ids/cut": 0.0}
    trained = sum(g.num_trained_tokens for g in groups)
    return {
        "kept_ids/cut": sizes.size / trained,
        "kept_ids/mean": float(sizes.mean()),
        "kept_ids/max": float(sizes.max()),
    }


def truncation_metrics(groups: Sequence[AssembledGroup], rules: Mapping[str, GroupRules]) -> dict[str, float]:
    """`truncation_mismatch`: the share of trained tokens that were sampled from a distribution truncated by top-p,
    top-k or min-p, but trained under the full distribution, which introduces a bias. Empty unless the configuration
    accepts this."""
    if not any(rule.truncated_sampling for rule in rules.values()):
        return {}
    cut = sum(g.num_trained_tokens for g in groups if rules[g.group.env].truncated_sampling)
    trained = sum(g.num_trained_tokens for g in groups)
    return {"truncation_mismatch": cut / trained if trained else float("nan")}


def rollout_distributions(trajectories: Iterable[TrajectoryRecord], batch: int) -> dict[str, list[float]]:
    """Rewards, advantages, lengths and ages of the completed rollouts.

    Groups dropped by online difficulty filtering have no advantages, but count in everything else. An advantage
    function that assigns an advantage to each turn contributes one value per turn.

    Args:
        trajectories: The trajectories of the batch, with advantages, and the trajectories filtered out since the
            previous batch.
        batch: The batch's number, from 0.
    """
    completed = [t for t in trajectories if t.error is None]
    advantages = [t.advantage for t in completed]
    advantages += [turn.advantage for t in completed if t.advantage is None for turn in t.turns]
    return {
        "distribution/reward": [t.reward for t in completed if t.reward is not None],
        "distribution/advantage": [value for value in advantages if value is not None],
        "distribution/completion_tokens": [t.num_sampled_tokens for t in completed],
        "distribution/turns": [len(t.turns) for t in completed],
        "distribution/staleness": [age(t, batch) for t in completed],
    }
