"""Converts evaluation results to plain values; `finite` replaces NaN by null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from verbatim.run.evaluation.intervals import Estimate
from verbatim.run.evaluation.pairs import PairedDifference
from verbatim.run.evaluation.results import EnvResult, ExampleResult


def estimate_to_json(found: Estimate) -> dict[str, Any]:
    """
    >>> estimate_to_json(Estimate(value=0.5, low=0.25, high=0.75, num_examples=4, num_values=8))
    {'value': 0.5, 'interval_95': [0.25, 0.75], 'examples': 4, 'episodes': 8}
    """
    return {
        "value": found.value,
        "interval_95": [found.low, found.high] if found.has_interval else None,
        "examples": found.num_examples,
        "episodes": found.num_values,
    }


def result_to_json(result: EnvResult) -> dict[str, Any]:
    """The result of one model on one environment, without its examples."""
    return {
        "episodes": result.num_episodes,
        "failed": result.num_failed,
        "failures": dict(result.failures),
        "examples": len(result.examples),
        "episodes_per_example": result.episodes_each,
        "success": estimate_to_json(result.success),
        "reward": estimate_to_json(result.reward),
        "pass_at": {str(k): estimate_to_json(found) for k, found in result.pass_at.items()},
        "pass_hat": {str(k): estimate_to_json(found) for k, found in result.pass_hat.items()},
        "metrics": result.metrics(),
        "spent": dict(result.spent),
    }


def example_to_json(example: ExampleResult) -> dict[str, Any]:
    """The result of one example."""
    return {
        "example_id": example.example_id,
        "episodes": example.num_episodes,
        "failed": example.num_failed,
        "successes": example.num_successes,
        "success": example.success,
        "reward": example.mean_reward,
        "pass_at": {str(k): value for k, value in example.pass_at.items()},
        "first_error": example.first_error,
    }


def difference_to_json(found: PairedDifference) -> dict[str, Any]:
    """The difference between two policies as plain values: second minus first."""
    is_compared = found.is_paired and not any(found.too_many_failed)
    return {
        "paired": found.is_paired,
        "pairs": found.num_pairs,
        "unpaired": list(found.num_unpaired),
        "success": estimate_to_json(found.success),
        "reward": estimate_to_json(found.reward),
        "gained": found.gained if is_compared else None,
        "lost": found.lost if is_compared else None,
        "too_many_failed": list(found.too_many_failed),
    }


def finite(value: Any) -> Any:
    """The value, with NaN and infinities, which JSON lacks, replaced by None, and with arrays replaced by lists."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value
