"""Identifies the rollout that a record belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutIdentity:
    """Names one rollout: its run, environment, example, group, place in the group, and seed."""

    example_id: str
    """Id of its example."""
    trajectory_id: str = ""
    """Unique within the run."""
    run_id: str = ""
    """The run, by the name of its folder; empty outside of a run."""
    env: str = ""
    """The name of its environment."""
    group_id: str = ""
    """Id of its group."""
    sample_index: int = 0
    """Its index in the group."""
    seed: int | None = None
    """The seed of its sampling, or None if it has none."""
