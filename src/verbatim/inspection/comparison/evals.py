"""Compares the evaluations of several runs: the last evaluation of each run, and the evaluations at the last step at
which all runs were evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.records.failed import MAX_FAILED
from verbatim.inspection.comparison.read_run import Metrics, Run
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.intervals import Estimate
from verbatim.run.evaluation.pairs import difference
from verbatim.run.evaluation.results import EnvResult, env_result
from verbatim.run.evaluation.rows import Compared
from verbatim.run.evaluation.stored import read_evaluated_episodes
from verbatim.run.evaluation.texts import letter

MOST_PAIRS = 6
"""Maximum number of pairs of runs to compare. If there are more pairs, each run is compared only with the first run."""


@dataclass(frozen=True, kw_only=True)
class ComparedEvals:
    """The evaluations of one environment in all runs."""

    env: str
    at: str
    """"last" for the last evaluation of each run; "shared" for the evaluations at the last step at which all runs were
    evaluated."""
    steps: Sequence[int | None]
    """For each run, the step after which it was evaluated; None if the run has no evaluation."""
    results: Sequence[EnvResult | None]
    """One result per run, computed from the stored episodes. If no episodes were kept, it comes from the logged
    metrics, and has no examples."""
    pairs: Sequence[Compared]
    """The comparisons of those pairs of runs in which both runs have kept their episodes."""


def compare_evals(runs: Sequence[Run], problems: list[str]) -> list[ComparedEvals]:
    """For each environment, compare the last evaluations of the runs. If their steps differ, also compare the
    evaluations at the last step at which all runs were evaluated.

    Args:
        runs: The runs to compare.
        problems: Descriptions of what could not be read are appended here.
    """
    found = []
    for env in dict.fromkeys(env for run in runs for env in run.evals):
        last = [max(run.evals[env]) if run.evals.get(env) else None for run in runs]
        there = [set(run.evals.get(env, ())) for run in runs]
        shared = max(set.intersection(*there), default=0)
        asked = [("last", last)]
        if shared and len(set(last)) > 1 and None not in last:
            asked.append(("shared", [shared] * len(runs)))
        for at, steps in asked:
            found.append(_compared(runs, env, at, steps, problems))
    return found


def _compared(
    runs: Sequence[Run], env: str, at: str, steps: Sequence[int | None], problems: list[str]
) -> ComparedEvals:
    outcomes = [_outcomes(run, env, step, problems) for run, step in zip(runs, steps, strict=True)]
    results: list[EnvResult | None] = []
    for run, step, played in zip(runs, steps, outcomes, strict=True):
        if step is None:
            results.append(None)
        else:
            results.append(env_result(env, played, ks=(4,)) if played else _from_metrics(env, run.evals[env][step]))
    most = max(
        (
            float(run.config["orchestrator.eval.max_failed"].value)
            for run in runs
            if "orchestrator.eval.max_failed" in run.config
        ),
        default=MAX_FAILED,
    )
    pairs = list(itertools.combinations(range(len(runs)), 2))
    if len(pairs) > MOST_PAIRS:
        pairs = [(0, place) for place in range(1, len(runs))]
    return ComparedEvals(
        env=env,
        at=at,
        steps=steps,
        results=results,
        pairs=[
            Compared(
                before=letter(one),
                after=letter(two),
                environments={env: difference(env, outcomes[one], outcomes[two], most)},
            )
            for one, two in pairs
            if outcomes[one] and outcomes[two]
        ],
    )


def _outcomes(run: Run, env: str, step: int | None, problems: list[str]) -> list[EvaluatedEpisode]:
    """The episodes of one evaluation; empty if the episodes were not kept."""
    if step is None or step not in run.kept_evals:
        return []
    try:
        return [outcome for _, outcome in read_evaluated_episodes(run.folder, {step}) if outcome.env == env]
    except (UsageError, OSError) as error:
        problems.append(str(error))
        return []


def _from_metrics(env: str, metrics: Metrics) -> EnvResult:
    """The result of an evaluation whose episodes were not kept."""
    episodes = int(metrics.get("episodes", 0))

    def estimate(name: str, stem: str) -> Estimate:
        return Estimate(
            value=metrics.get(name, math.nan),
            low=metrics.get(f"{stem}/low", math.nan),
            high=metrics.get(f"{stem}/high", math.nan),
            num_examples=int(metrics.get("examples", 0)),
            num_values=episodes,
        )

    shown: Mapping[str, float] = {
        name: value
        for name, value in metrics.items()
        if name in ("turns", "completion_tokens", "valid_format", "tool_errors", "truncated")
    }
    return EnvResult(
        env=env,
        num_episodes=episodes,
        num_failed=int(metrics.get("failed", 0)),
        figures=shown,
        success=estimate("success", "success"),
        reward=estimate("reward/mean", "reward"),
    )
