"""Identifies the rollout that a record belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutIdentity:
    """Identifies one rollout by its run, environment, example, group, place in the group, and seed."""

    example_id: str
    """Id of the rollout's example."""
    trajectory_id: str = ""
    """Id of the rollout, unique within the run."""
    run_id: str = ""
    """Name of the run's folder; empty outside of a run."""
    env: str = ""
    """The name of the rollout's environment."""
    group_id: str = ""
    """Id of the rollout's group."""
    sample_index: int = 0
    """The rollout's index in the group."""
    seed: int | None = None
    """The seed for sampling the rollout, or None if it has no seed."""
