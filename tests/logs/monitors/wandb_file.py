"""What is in a `.wandb` file. wandb ships its records' protobuf classes, and no reader of the file around them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 1 << 15
HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a fragment: 1 = a whole record, 2 = its first part, 3 = a middle one, 4 = the last."""


@dataclass
class WandbRecord:
    """One record."""

    run_id: str = ""
    project: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Values by step."""
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    """None while the record is open."""

    @property
    def is_finished(self) -> bool:
        return self.exit_code is not None


def read_wandb_file(path: Path) -> WandbRecord:
    from wandb.proto import wandb_internal_pb2

    found = WandbRecord()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found.run_id, found.project, found.name = run.run_id, run.project, run.display_name
                found.tags = list(run.tags)
                found.config = {item.key: json.loads(item.value_json) for item in run.config.update}
            case "history":
                values = found.history.setdefault(record.history.step.num, {})
                for item in record.history.item:
                    _set(values, list(item.nested_key) or [item.key], json.loads(item.value_json))
            case "exit":
                found.exit_code = record.exit.exit_code
            case "summary":
                for item in record.summary.update:
                    _set(found.summary, list(item.nested_key) or [item.key], json.loads(item.value_json))
    return found


def _set(values: dict[str, Any], keys: list[str], value: Any) -> None:
    *outer, last = keys
    for key in outer:
        values = values.setdefault(key, {})
    values[last] = value


def _records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format: fragments in blocks, none across a block's end."""
    assert data[:4] == b":W&B"
    position, parts = 7, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):
            yield parts
            parts = b""
