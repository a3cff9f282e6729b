"""Writes those parts of a checkpoint that a fork changes: the loop's state, the optimizer, stored paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.disk import write_file
from verbatim.core.formats import metadata_of
from verbatim.logs.checkpoints import (
    Origin,
    read_json,
    read_loop_state,
    read_record,
    write_json,
    write_loop_state,
    write_record,
)
from verbatim.logs.checkpoints.loop_state import POOLS, STATE
from verbatim.logs.checkpoints.store import WEIGHTS
from verbatim.models.source import ADAPTER_CONFIG
from verbatim.trainer.progress import STATE_FILE

LOOP_FILES = (STATE, *(f"{pool}_examples.jsonl" for pool in POOLS))
"""The files of the training loop's state."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""The name of the optimizer's file. It is repeated from `trainer.optimizer_state`, because that module imports
torch."""
_BASE = "base_model_name_or_path"
"""The key, in an adapter's configuration, that holds the path of the adapter's base model."""
_REFERENCE = "trainer.reference."
"""The prefix of the reference model's keys."""


def write_changed_state(source: Path, target: Path, origin: Origin, *, seed: int, moved: tuple[Path, Path]) -> None:
    """Write the changed parts into a copy of a checkpoint.

    Args:
        source: The checkpoint.
        target: The copy, without `LOOP_FILES`. Its other files may be hard links to the checkpoint's files, so they are
            replaced, never modified.
        origin: Says which parts are reset, and which keys have changed.
        seed: Seed of the order of examples, if this order is reset.
        moved: The folders of the forked run and of the fork.
    """
    state = read_loop_state(source)
    write_loop_state(target, _fresh_examples(state, seed) if "examples" in origin.fresh else state)
    if "optimizer" in origin.fresh:
        _drop_moments(target / "trainer")
    if any(change.startswith(_REFERENCE) for change in origin.changes):  # the stored digest is of the old reference
        progress = target / "trainer" / STATE_FILE
        write_record(progress, {**read_record(progress), "frozen": {}})
    adapter = target / WEIGHTS / ADAPTER_CONFIG
    if adapter.is_file():
        described, (old, new) = read_json(adapter), moved
        base = Path(described.get(_BASE, ""))
        if base.is_absolute() and base.is_relative_to(old):  # the base was built or warm-started in the old run folder
            write_json(adapter, {**described, _BASE: str(new.absolute() / base.relative_to(old))})


def _fresh_examples(state: dict[str, Any], seed: int) -> dict[str, Any]:
    """The loop's state with nothing in flight, empty pools and a new order of the examples. Group numbers continue."""
    schedule, ledger = state["dispatcher"]["schedule"], state["ledger"]
    drawn = schedule["drawn"]
    fresh = {
        "rng": np.random.PCG64(seed).state,
        "pass": {},
        "drained": [],
        "drawn": drawn,
        "pools": {**{pool: [] for pool in POOLS}, "recent": {}},
    }
    return {
        **state,
        "dispatcher": {"schedule": fresh, "held": []},
        "ledger": {**ledger, "settled_below": drawn, "settled_above": []},
    }


def _drop_moments(folder: Path) -> None:
    """Reset the optimizer's moments. The count of optimizer steps stays, and with it the learning-rate schedule."""
    from safetensors.numpy import save

    for file in folder.glob("*.safetensors"):
        file.unlink()
    write_file(folder / OPTIMIZER_FILE, save({}, metadata_of("optimizer*.safetensors")))
