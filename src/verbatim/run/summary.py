"""Summarises a run in a few figures, computed from the metrics log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.environments.base import Environment
from verbatim.monitors.jsonl import read_jsonl
from verbatim.run.intervals import gain_interval

_ONLY_WHERE_KNOWN = ("valid_format_before_rl", "success_best_constant_policy")
"""Left out where they mean nothing: no environment offers tools, or says what a policy reaches that ignores replies."""

_GAIN = ("gain", "gain_interval_95")


def best_constants(environments: Mapping[str, Environment]) -> dict[str, float]:
    """Success of the best policy that ignores what it observes, by label, where an environment knows it."""
    return {
        label: float(environment.best_constant_policy_success())
        for label, environment in environments.items()
        if hasattr(environment, "best_constant_policy_success")
    }


def summary_of(metrics_path: Path, best_constant: Mapping[str, float]) -> dict[str, Any]:
    """Before, after, and how much it took, read from a metrics log.

    With several environments the top-level figures are means over them, and `environments` has each.
    """
    first: dict[str, dict[str, Any]] = {}
    last: dict[str, dict[str, Any]] = {}
    final: dict[str, Any] = {}
    steps, rollouts, failed = 0, 0, 0
    logged: set[int] = set()
    for record in read_jsonl(metrics_path):
        if record["kind"] == "eval":
            if record["metrics"].get("episodes") == 0:
                continue  # it was left out
            if record["step"] == 0:
                first[record["env"]] = record["metrics"]
            last[record["env"]] = record["metrics"]
        else:
            logged.add(record["step"])
            steps, final = record["step"], record["metrics"]
            rollouts += final.get("rollouts", 0)
            failed += final.get("rollouts/failed", 0)
    each = {
        env: {
            "success_before_rl": first.get(env, {}).get("success"),
            "valid_format_before_rl": first.get(env, {}).get("valid_format"),
            "success_after_rl": last[env]["success"],
            "success_best_constant_policy": best_constant.get(env),
            **_gain(first.get(env), last[env]),
        }
        for env in last
    }
    names = ("success_before_rl", "valid_format_before_rl", "success_after_rl", "success_best_constant_policy")
    summary: dict[str, Any] = {name: _mean([figures[name] for figures in each.values()]) for name in names}
    for name in _ONLY_WHERE_KNOWN:
        for figures in (summary, *each.values()):
            if figures[name] is None:
                del figures[name]
    if len(each) == 1:
        summary |= {name: value for figures in each.values() for name, value in figures.items() if name in _GAIN}
    summary |= {
        "steps": steps,
        "rollouts": rollouts,
        "failed_rollouts": failed,
        "sampled_tokens": final.get("ledger/sampled", 0),
        "trained_tokens": final.get("ledger/trained", 0),
    }
    if len(logged) < steps:  # lines that a resume found damaged: these steps are in no sum
        summary["steps_missing_in_log"] = steps - len(logged)
    if len(each) > 1:
        summary["environments"] = each
    return summary


def _gain(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> dict[str, Any]:
    """What success gained, with its interval; empty where an evaluation is missing or did not count its episodes."""
    if before is None or before is after:
        return {}
    shares = [(float(metrics["success"]), int(metrics.get("episodes", 0))) for metrics in (before, after)]
    if not all(episodes for _, episodes in shares):
        return {}
    low, high = gain_interval(*shares)
    return {"gain": round(shares[1][0] - shares[0][0], 4), "gain_interval_95": [round(low, 4), round(high, 4)]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None
