"""Reads and writes `trainer.json`: how many optimizer steps are done, and which frozen models scored the tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from verbatim.errors import CheckpointError
from verbatim.machine_faults import naming

STATE_FILE = "trainer.json"


def write_progress(folder: Path, done: int, total: int, fingerprints: Mapping[str, str]) -> None:
    """Write how many optimizer steps are done, of how many, and the digests of frozen models' weights by stream."""
    state = {"num_optimizer_steps": done, "total_optimizer_steps": total, "frozen": dict(fingerprints)}
    with naming(folder / STATE_FILE):
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")


def read_progress(folder: Path, total: int, fingerprints: Mapping[str, str]) -> int:
    """The optimizer steps that are done.

    Raises:
        CheckpointError: no such file, more steps than this run has, or a frozen model with other weights.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        done, scored = state["num_optimizer_steps"], dict(state.get("frozen", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no trainer state: {error!r}; expected a folder that save_state "
                              "wrote") from error  # fmt: skip
    if not isinstance(done, int) or not 0 <= done <= total:
        raise CheckpointError(f"{path}: {done!r} optimizer steps are done, this run has {total} in all; raise "
                              "max_steps to go on")  # fmt: skip
    for name, digest in fingerprints.items():
        if scored.get(name, digest) != digest:
            raise CheckpointError(f"{path}: the {name} model of this run had other weights; put back the model "
                                  "that it was started with, or start a new run")  # fmt: skip
    return done
