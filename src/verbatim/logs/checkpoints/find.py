"""Finds a checkpoint of a run by name: "latest", "best", or a step."""

from __future__ import annotations

from pathlib import Path

from verbatim.core.errors import UsageError
from verbatim.core.texts import ranges
from verbatim.logs.checkpoints.manifest import find_damage
from verbatim.logs.checkpoints.store import Checkpoint, CheckpointStore


def find_checkpoint(run: Path, which: str = "latest") -> Checkpoint:
    """Find an undamaged checkpoint of a run.

    Args:
        run: The run folder.
        which: "latest" for the newest undamaged checkpoint, "best" for the checkpoint of the best evaluation
            (`checkpoint.keep_best`), or a step, such as "40".

    Raises:
        UsageError: there is no such checkpoint, or it is damaged; the message lists the existing checkpoints.
        CheckpointError: all checkpoints are damaged, or they cannot be read.
    """
    store = CheckpointStore(run / "checkpoints", read_only=True)
    steps = store.steps()
    if not steps:
        raise UsageError(f"{run} has no checkpoints; expected the folder of a run, with checkpoints/step_...")
    there = f"there are checkpoints of {'step' if len(steps) == 1 else 'steps'} {ranges(steps)}"
    if which == "latest":
        latest = store.latest()
        assert latest is not None, "there are checkpoints, and `latest` raises if all are damaged"
        return latest
    if which == "best":
        best = store.best()
        if best is None:
            raise UsageError(
                f"{run} has no best checkpoint: set checkpoint.keep_best = {{}} before a run is trained; {there}"
            )
        step = int(best["step"])
    elif which.isdecimal():
        step = int(which)
    else:
        raise UsageError(f"checkpoint {which!r} of {run}: expected latest, best or a step; {there}")
    if step not in steps:
        raise UsageError(f"{run} has no checkpoint of step {step}; {there}")
    folder = store.folder / f"step_{step:06d}"
    if (damage := find_damage(folder)) is not None:
        raise UsageError(f"checkpoint {folder} is damaged: {damage}; {there}")
    return Checkpoint(step=step, folder=folder)
