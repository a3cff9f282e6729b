"""Computes the final results of a run from its metrics log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.records.failed import MAX_FAILED, too_many_failed
from verbatim.environments.environment import Environment
from verbatim.logs.monitors.learning_curve import reward_is_success, reward_parts
from verbatim.logs.monitors.metrics_log import read_history
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.pairs import difference
from verbatim.run.evaluation.stored import read_evaluated_episodes

logger = logging.getLogger(__name__)

_ONLY_WHERE_KNOWN = ("valid_format_before_rl", "success_best_constant_policy")
"""Values that are omitted if they are not known: no tool call was tried, or no environment knows its best constant
policy."""

_MEANS = ("success_before_rl", "valid_format_before_rl", "success_after_rl", "success_best_constant_policy")
"""With several environments, the top level of the summary has the means of these values over the environments; other
values appear only per environment."""


def best_constants(environments: Mapping[str, Environment]) -> dict[str, float]:
    """Success rate of the best policy that ignores its observations, by label, for environments that report this
    rate."""
    return {
        label: float(environment.best_constant_policy_success())
        for label, environment in environments.items()
        if hasattr(environment, "best_constant_policy_success")
    }


def summary_of(
    metrics_path: Path,
    best_constant: Mapping[str, float],
    run: Path | None = None,
    max_failed: float = MAX_FAILED,
    forked_at: int = -1,
) -> dict[str, Any]:
    """The results before and after training, and the amount of work, from a metrics log.

    With several environments the top-level values are means over the environments, and `environments` has the values of
    each environment.

    Args:
        metrics_path: The metrics log.
        best_constant: As returned by `best_constants`.
        run: The folder with the evaluated episodes, for the confidence interval of the gain; None for no interval.
        max_failed: The largest share of failed episodes that an evaluation may have and still be used in comparisons.
        forked_at: The step at which the run was forked; evaluations up to this step belong to the original run and do
            not count as results of the fork. -1 if the run is not a fork.

    Raises:
        UsageError: the metrics log cannot be read.
    """
    history, evaluated = read_history(metrics_path)
    evals = [
        (env, step, metrics)
        for env, rows in evaluated.items()
        for step, metrics in rows
        if metrics.get("episodes") != 0  # the evaluation was skipped
    ]
    first = {env: metrics for env, step, metrics in evals if step == 0}
    last = {env: metrics for env, step, metrics in evals if step > forked_at}
    last_step = max((step for _, step, _ in evals if step > forked_at), default=0)
    steps, final = history[-1] if history else (0, {})
    intervals = _gain_intervals(run, last_step, max_failed)
    each = {
        env: {
            **_figures(first.get(env), last.get(env), max_failed),
            "success_best_constant_policy": best_constant.get(env),
            **({"gain_interval_95": intervals[env]} if env in intervals else {}),
        }
        for env in {**first, **last}
    }
    summary: dict[str, Any] = {name: _mean([figures[name] for figures in each.values()]) for name in _MEANS}
    for name in _ONLY_WHERE_KNOWN:
        for figures in (summary, *each.values()):
            if figures[name] is None:
                del figures[name]
    if len(each) == 1:
        summary |= next(iter(each.values()))
    summary |= {
        "steps": steps,
        "rollouts": sum(metrics.get("rollouts", 0) for _, metrics in history),
        "failed_rollouts": sum(metrics.get("rollouts/failed", 0) for _, metrics in history),
        "sampled_tokens": final.get("ledger/sampled", 0),
        "trained_tokens": final.get("ledger/trained", 0),
    }
    missing = steps - len(dict(history))
    if missing > 0:  # a resume found these lines damaged; their steps are missing from the sums
        summary["steps_missing_in_log"] = missing
    if len(each) > 1:
        summary["environments"] = each
    return summary


def _figures(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, max_failed: float) -> dict[str, Any]:
    """One environment's success before and after training, and the gain. The reward and its parts are included too if
    they differ from success.

    There is no gain if an evaluation is missing or was skipped, or if too many of its episodes failed; then
    `not_compared` has the reason.
    """
    sides = {"before": before or {}, "after": after or {}}
    found: dict[str, Any] = {
        "success_before_rl": sides["before"].get("success"),
        "valid_format_before_rl": sides["before"].get("valid_format"),
        "success_after_rl": sides["after"].get("success"),
    }
    if not all(map(reward_is_success, sides.values())):
        found |= {f"reward_{when}_rl": _number(metrics.get("reward/mean")) for when, metrics in sides.items()}
    for when, metrics in sides.items():
        if parts := reward_parts(metrics):
            found[f"reward_parts_{when}_rl"] = parts
    found |= {f"evaluated_{name}": sides["after"][name] for name in ("examples", "episodes") if name in sides["after"]}
    if before is None or after is None or before is after or not after.get("episodes"):
        return found
    for when, metrics in sides.items():
        if clause := too_many_failed(int(metrics.get("failed", 0)), int(metrics.get("episodes", 0)), max_failed):
            return {**found, "not_compared": f"{when} training, {clause}"}
    return {**found, "gain": round(float(after["success"]) - float(before["success"]), 4)}


def _number(value: Any) -> float | None:
    """The value as a float; None if it is missing or NaN."""
    return None if value is None or math.isnan(float(value)) else float(value)


def _gain_intervals(run: Path | None, last_step: int, max_failed: float) -> dict[str, list[float]]:
    """The 95% confidence interval of the gain, by environment, over the episodes that the first and the last evaluation
    have in common (same example and seed). Empty if the episodes cannot be read."""
    before: dict[str, list[EvaluatedEpisode]] = {}
    after: dict[str, list[EvaluatedEpisode]] = {}
    if run is None or not last_step:
        return {}
    try:
        for step, outcome in read_evaluated_episodes(run, {0, last_step}):
            (after if step else before).setdefault(outcome.env, []).append(outcome)
    except (UsageError, OSError) as error:
        logger.error("the summary lacks the confidence interval of the gain: %s", error)
        return {}
    found = {env: difference(env, before[env], after[env], max_failed) for env in before if env in after}
    return {
        env: [round(gain.success.low, 4), round(gain.success.high, 4)]
        for env, gain in found.items()
        if gain.is_paired and not any(gain.too_many_failed)
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
