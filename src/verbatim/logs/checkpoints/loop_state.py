"""Reads and writes the orchestrator's part of a checkpoint: a JSON file, and a line per example in a difficulty pool.

```
orchestrator.json      step, ledger, schedule with the state of its random numbers, groups in flight
easy_examples.jsonl    {"env": "guess_number", "example_id": "secret-7", "mean_reward": 1.0}
hard_examples.jsonl
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.core.errors import CheckpointError
from verbatim.logs.checkpoints.json_files import read_record, write_record

STATE = "orchestrator.json"
POOLS = ("easy", "hard")


def write_loop_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `Orchestrator.state_dict()` into a checkpoint's folder."""
    dispatcher = state["dispatcher"]
    schedule = dispatcher["schedule"]
    pools = dict(schedule["pools"])
    for pool in POOLS:
        rows = pools.pop(pool)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{pool}_examples.jsonl").write_text(text, encoding="utf-8")
    write_record(folder / STATE, {**state, "dispatcher": {**dispatcher, "schedule": {**schedule, "pools": pools}}})


def read_loop_state(folder: Path) -> dict[str, Any]:
    """Read the state that `write_loop_state` wrote.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version; names file and line.
    """
    state = read_record(folder / STATE)
    try:
        pools = state["dispatcher"]["schedule"]["pools"]
    except (LookupError, TypeError):
        raise CheckpointError(f"{folder / STATE} is no state of a run") from None
    for pool in POOLS:
        pools[pool] = _read_rows(folder / f"{pool}_examples.jsonl")
    return state


def _read_rows(path: Path) -> list[Any]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(f"{path}:{number}: no JSON: {error}") from None
    return rows
