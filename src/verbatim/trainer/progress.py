"""Reads and writes `trainer.json`: how far the optimizer steps are, and which frozen models scored the tokens."""

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
    """Where a trainer is in its schedule.

    Example: batches of 2 optimizer steps each, of which the third had one trajectory: after 3 of 10 batches 5 are done,
    6 planned, and the schedule is stretched over 20.
    """

    num_optimizer_steps: int
    """Those that are done."""
    planned_optimizer_steps: int
    """Those that the schedule had for the batches so far."""
    total_optimizer_steps: int
    """Those over which the schedule is stretched."""
    last_lr: float | None
    """The learning rate of the last one that is done; None before the first."""
    next_lr: float
    """That of the next one, as things stand."""


def write_progress(folder: Path, progress: TrainerProgress, fingerprints: Mapping[str, str]) -> None:
    """Write where the trainer is, and the digests of frozen models' weights by stream."""
    state = stamped(STATE_FILE, {**asdict(progress), "frozen": dict(fingerprints)})
    with naming(folder / STATE_FILE):
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")


def read_progress(folder: Path, fingerprints: Mapping[str, str]) -> tuple[TrainerProgress, dict[str, str]]:
    """Where the trainer was, and the digests of all frozen models that have scored this run so far, by stream: a model
    that was left out for a while is still the one that may come back.

    A frozen model that is added or left out is logged as a warning.

    Args:
        folder: Where `write_progress` wrote.
        fingerprints: Digests of the frozen models' weights that there are now.

    Raises:
        CheckpointError: no such file, one of another version, or a frozen model with other weights.
    """
    path = folder / STATE_FILE
    try:
        state = content_of(STATE_FILE, json.loads(path.read_text(encoding="utf-8")), path)
        progress, scored = _progress(state), dict(state["frozen"])
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no trainer state: {error!r}; expected a folder that save_state wrote"
        ) from error
    for name, digest in fingerprints.items():
        if scored.get(name, digest) != digest:
            raise CheckpointError(
                f"{path}: the {name} model of this run had other weights; put back the model "
                "that it was started with, or start a new run"
            )
    for name in sorted(scored.keys() ^ fingerprints.keys()):
        if progress.num_optimizer_steps:
            how = "goes on without it" if name in scored else "had none until now"
            logger.warning("%s model: this run %s, after %d optimizer steps", name, how, progress.num_optimizer_steps)
    return progress, {**scored, **fingerprints}


def _progress(state: Mapping[str, Any]) -> TrainerProgress:
    """
    Raises:
        ValueError, KeyError: the figures are impossible or missing.
    """
    done, planned, total = (state[f"{name}_optimizer_steps"] for name in ("num", "planned", "total"))
    if any(type(number) is not int for number in (done, planned, total)) or not 0 <= done <= min(planned, total):
        raise ValueError(f"{done!r} optimizer steps are done, of {planned!r} and {total!r}")
    last = state["last_lr"]
    return TrainerProgress(
        num_optimizer_steps=done,
        planned_optimizer_steps=planned,
        total_optimizer_steps=total,
        last_lr=None if last is None else float(last),
        next_lr=float(state["next_lr"]),
    )
