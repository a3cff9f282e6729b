"""Reads and writes `trainer.json`: the progress of the schedule, and fingerprints of the frozen models used so far."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verbatim.core.errors import CheckpointError, FormatError
from verbatim.core.formats import content_of, stamped
from verbatim.core.machine_faults import naming

logger = logging.getLogger(__name__)

STATE_FILE = "trainer.json"


@dataclass(frozen=True, kw_only=True)
class TrainerProgress:
    """A trainer's progress in its learning-rate schedule.

    Example: 10 batches of 2 optimizer steps each, and the third batch had only one trajectory. After 3 batches, 5 steps
    are completed and 6 were planned; the schedule is 20 steps long.
    """

    num_optimizer_steps: int
    """Completed optimizer steps."""
    planned_optimizer_steps: int
    """Optimizer steps planned for the batches so far; more than the completed steps if batches had few trajectories."""
    total_optimizer_steps: int
    """Length of the schedule in optimizer steps."""
    last_lr: float | None
    """Learning rate of the last completed step; None before the first."""
    next_lr: float
    """Learning rate of the next optimizer step under this schedule."""


def write_progress(folder: Path, progress: TrainerProgress, fingerprints: Mapping[str, str]) -> None:
    """Write the trainer's progress and the fingerprints of the frozen models' weights, by stream."""
    state = stamped(STATE_FILE, {**asdict(progress), "frozen": dict(fingerprints)})
    with naming(folder / STATE_FILE):
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")


def read_progress(folder: Path, fingerprints: Mapping[str, str]) -> tuple[TrainerProgress, dict[str, str]]:
    """The saved progress, and the fingerprints of all frozen models that have scored this run so far, by stream.

    If the run is resumed without one of these models, its fingerprint is kept, so that the model can be added again
    later, but only with the same weights. A warning is logged if a frozen model was added or left out.

    Args:
        folder: The folder that `write_progress` wrote.
        fingerprints: Fingerprints of the current frozen models' weights, by stream.

    Raises:
        CheckpointError: the file is missing or has an unknown format version, or the weights of a frozen model have
            changed.
    """
    path = folder / STATE_FILE
    try:
        state = content_of(STATE_FILE, json.loads(path.read_text(encoding="utf-8")), path)
        progress, scored = _progress(state), dict(state["frozen"])
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a trainer state: {error!r}; expected a folder that save_state wrote"
        ) from error
    for name, digest in fingerprints.items():
        if scored.get(name, digest) != digest:
            raise CheckpointError(
                f"{path}: the {name} model of this run had other weights; put back the model "
                "that the run was started with, or start a new run"
            )
    for name in sorted(scored.keys() ^ fingerprints.keys()):
        if progress.num_optimizer_steps:
            how = "goes on without it" if name in scored else "had none until now"
            logger.warning("%s model: this run %s, after %d optimizer steps", name, how, progress.num_optimizer_steps)
    return progress, {**scored, **fingerprints}


def _progress(state: Mapping[str, Any]) -> TrainerProgress:
    """The progress stored in the content of a file.

    Raises:
        ValueError, KeyError: the numbers are impossible or missing.
    """
    done, planned, total = (state[f"{name}_optimizer_steps"] for name in ("num", "planned", "total"))
    if any(type(number) is not int for number in (done, planned, total)) or not 0 <= done <= min(planned, total):
        raise ValueError(f"{done!r} optimizer steps are done, but {planned!r} were planned so far and {total!r} in all")
    last = state["last_lr"]
    return TrainerProgress(
        num_optimizer_steps=done,
        planned_optimizer_steps=planned,
        total_optimizer_steps=total,
        last_lr=None if last is None else float(last),
        next_lr=float(state["next_lr"]),
    )
