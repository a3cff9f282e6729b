"""Reads and writes the orchestrator's part of a checkpoint: a JSON file, and for each difficulty pool a file with one
line per example.

```
orchestrator.json      step, ledger, schedule with the state of its random generators, groups in flight
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
from verbatim.logs.checkpoints.json_files import read_json, read_record, write_record

STATE = "orchestrator.json"
POOLS = ("easy", "hard")
"""The difficulty pools that have a file each. An example that is in neither pool is in the normal pool."""


def write_loop_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `Orchestrator.state_dict()` into a checkpoint's folder. The files are synced later, by `write_manifest`."""
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
        CheckpointError: a file is missing or damaged, or a different version of Verbatim wrote it; the message names
            the file.
    """
    state = read_record(folder / STATE)
    try:
        pools = state["dispatcher"]["schedule"]["pools"]
    except (LookupError, TypeError):
        raise CheckpointError(f"{folder / STATE} is not the state of a run") from None
    for pool in POOLS:
        file = folder / f"{pool}_examples.jsonl"
        pools[pool] = read_json(file, lambda text: [json.loads(line) for line in text.splitlines()])
    return state
