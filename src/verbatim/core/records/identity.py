"""Identifies the rollout that a record belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RolloutIdentity:
    """Names one rollout: its run, environment, example, group, place in the group, and seed."""

    example_id: str
    """The example it is about."""
    trajectory_id: str = ""
    """Unique in its run."""
    run_id: str = ""
    """The run it belongs to, by the name of its folder; empty outside of one."""
    env: str = ""
    """The name of its environment."""
    group_id: str = ""
    """The group it belongs to."""
    sample_index: int = 0
    """Its place in the group."""
    seed: int | None = None
    """The seed of its sampling; None if it has none."""
