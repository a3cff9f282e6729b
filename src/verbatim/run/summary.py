"""Summarises a run in a few figures, computed from the metrics log."""

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
"""Left out where they mean nothing: no call was tried, or no environment says what a policy without replies reaches."""

_MEANS = ("success_before_rl", "valid_format_before_rl", "success_after_rl", "success_best_constant_policy")
"""Of several environments the summary has the means of these; everything else of an evaluation stands with each."""


def best_constants(environments: Mapping[str, Environment]) -> dict[str, float]:
    """Success of the best policy that ignores what it observes, by label, where an environment knows it."""
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
    """Before, after, and how much it took, read from a metrics log.

    With several environments the top-level figures are means over them, and `environments` has each.

    Args:
        metrics_path: The metrics log.
        best_constant: As `best_constants` gives it.
        run: The folder with the evaluated episodes, for the interval of what success gained.
        max_failed: Largest share of failed episodes with which an evaluation is compared with another one.
        forked_at: The step after which a fork went on; the evaluations up to it are those of another run, and are not
            what this one came to. -1: the run is no fork.

    Raises:
        UsageError: the metrics log cannot be read.
    """
    history, evaluated = read_history(metrics_path)
    evals = [
        (env, step, metrics)
        for env, rows in evaluated.items()
        for step, metrics in rows
        if metrics.get("episodes") != 0  # it was left out
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
    if missing > 0:  # lines that a resume found damaged: these steps are in no sum
        summary["steps_missing_in_log"] = missing
    if len(each) > 1:
        summary["environments"] = each
    return summary


def _figures(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, max_failed: float) -> dict[str, Any]:
    """Success before and after; the reward and its parts too, where success does not tell them; what success gained,
    unless an evaluation is missing or was left out, or too many episodes of one failed, which `not_compared` says."""
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
    """None for what was not measured."""
    return None if value is None or math.isnan(float(value)) else float(value)


def _gain_intervals(run: Path | None, last_step: int, max_failed: float) -> dict[str, list[float]]:
    """The 95% interval of that, by environment: over the pairs of episodes of the same example and seed that the first
    evaluation and the last one have in common. Episodes that cannot be read cost the intervals."""
    before: dict[str, list[EvaluatedEpisode]] = {}
    after: dict[str, list[EvaluatedEpisode]] = {}
    if run is None or not last_step:
        return {}
    try:
        for step, outcome in read_evaluated_episodes(run, {0, last_step}):
            (after if step else before).setdefault(outcome.env, []).append(outcome)
    except (UsageError, OSError) as error:
        logger.error("the summary leaves out the interval of what was gained: %s", error)
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
