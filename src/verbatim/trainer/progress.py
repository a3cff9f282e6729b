"""Reads and writes `trainer.json`: how many optimizer steps are done, and which frozen models scored the tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from verbatim.errors import CheckpointError
from verbatim.machine_faults import naming

logger = logging.getLogger(__name__)

STATE_FILE = "trainer.json"


def write_progress(folder: Path, done: int, total: int, fingerprints: Mapping[str, str]) -> None:
    """Write how many optimizer steps are done, of how many, and the digests of frozen models' weights by stream."""
    state = {"num_optimizer_steps": done, "total_optimizer_steps": total, "frozen": dict(fingerprints)}
    with naming(folder / STATE_FILE):
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")


def read_progress(folder: Path, total: int, fingerprints: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """The optimizer steps that are done, and the digests of all frozen models that have scored this run so far, by
    stream: a model that was left out for a while is still the one that may come back.

    A frozen model that is added or left out is logged as a warning.

    Args:
        folder: Where `write_progress` wrote.
        total: Optimizer steps of the run.
        fingerprints: Digests of the frozen models' weights that there are now.

    Raises:
        CheckpointError: no such file, more steps than this run has, or a frozen model with other weights.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        done, scored = state["num_optimizer_steps"], dict(state.get("frozen", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no trainer state: {error!r}; expected a folder that save_state wrote"
        ) from error
    if not isinstance(done, int) or not 0 <= done <= total:
        raise CheckpointError(
            f"{path}: {done!r} optimizer steps are done, this run has {total} in all; raise max_steps to go on"
        )
    for name, digest in fingerprints.items():
        if scored.get(name, digest) != digest:
            raise CheckpointError(
                f"{path}: the {name} model of this run had other weights; put back the model "
                "that it was started with, or start a new run"
            )
    for name in sorted(scored.keys() ^ fingerprints.keys()):
        if done:
            how = "goes on without it" if name in scored else "had none until now"
            logger.warning("%s model: this run %s, after %d optimizer steps", name, how, done)
    return done, {**scored, **fingerprints}
