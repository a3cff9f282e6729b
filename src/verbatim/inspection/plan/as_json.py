"""Converts a plan to one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verbatim.inspection.plan.changes import Suggestion
from verbatim.inspection.plan.predict import Plan
from verbatim.inspection.plan.show import problem


def plan_as_json(plan: Plan, changes: Sequence[Suggestion]) -> dict[str, Any]:
    """Convert a plan to plain JSON values with all its figures, in bytes, seconds and tokens."""
    case, memory = plan.case, plan.memory
    return {
        "fits": plan.fits,
        "problem": None if plan.fits else problem(plan),
        "device": {**asdict(case.device), "flops": dict(case.device.flops)},
        "processes": case.placement.processes,
        "devices": case.placement.devices,
        "sampler_placement": case.placement.where,
        "assumed": asdict(case.assumed),
        "batch": {
            "said": case.batch.said,
            "rollouts": case.batch.num_rollouts,
            "samples": len(case.batch.samples),
            "longest": case.batch.longest,
            "sampled_tokens": case.batch.sampled_tokens,
        },
        "parameters": memory.num_parameters,
        "trained_parameters": memory.num_trained,
        "packing": memory.packing,
        "micro_batches": [[m.num_tokens for m in mine] for mine in memory.dealt],
        "memory": {
            "peak": memory.peak,
            "parts": dict(memory.parts),
            "between_steps": memory.between_steps,
            "needed": plan.needed,
            "usable": plan.usable,
            "tokens_that_fit": plan.tokens_that_fit,
        },
        "trainer": asdict(plan.trainer),
        "sampler": asdict(plan.sampler),
        "seconds": plan.seconds,
        "update_bytes": plan.update_bytes,
        "kept_set_bytes": plan.kept_set_bytes,
        "changes": [asdict(change) for change in changes],
    }
