"""Writes and reads messages to the trainer and its answers, as numbered files.

```
exchange/{session}/
    config.toml              the trainer's configuration, which has to be the orchestrator's
    ready.json               the trainer's state; from then on messages may come
    attached                 made by the orchestrator that is served; a session has only one
    trainer.json  orchestrator.json          heartbeats
    messages/000001.safetensors                a batch and what to do with it
    answers/000001.json                      its result
    states/v000025/                          the trainer's part of a checkpoint, on its way there
```

The trainer executes messages in the order of their numbers, one at a time. A session is one process of each side:
the files of a killed process are never read again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from verbatim.errors import RunStopped
from verbatim.records.samples import assert_same_streams
from verbatim.transport.base import StepReport, TrainerReady
from verbatim.transport.canary import Probes
from verbatim.types import TrainingSample

_ARRAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures")
_STREAM = "_logprobs"
"""Suffix of a logprob stream's tensor name: the stream "teacher" is the tensor "teacher_logprobs"."""
_NAMES = ("trajectory_id", "group_id", "env", "part")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerMessage:
    """A request to the trainer."""

    kind: Literal["train", "save", "stop"]
    """Train on a batch; write its state; end."""
    version: int = 0
    """The policy version after the batch, or of the state to be written."""
    samples: tuple[TrainingSample, ...] = ()
    """The batch."""
    checkpoint: bool = False
    """With a batch: also leave the trainer's part of a checkpoint."""
    folder: Path | None = None
    """Where the state is to be written."""


def message_to_bytes(message: TrainerMessage) -> bytes:
    """A safetensors file: every array of all samples, one after the other, and their lengths; the rest as metadata."""
    samples = message.samples
    tensors = {name: np.concatenate([getattr(s, name) for s in samples]) for name in _ARRAYS} if samples else {}
    tensors["lengths"] = np.array([len(sample) for sample in samples], dtype=np.int32)
    assert_same_streams(samples)
    for stream in samples[0].logprob_streams if samples else ():
        tensors[stream + _STREAM] = np.concatenate([sample.logprob_streams[stream] for sample in samples])
    head = {
        "kind": message.kind,
        "version": message.version,
        "checkpoint": message.checkpoint,
        "folder": None if message.folder is None else str(message.folder.resolve()),  # the trainer may stand elsewhere
        **{name: [getattr(sample, name) for sample in samples] for name in _NAMES},
    }
    data: bytes = save(tensors, metadata={"message": json.dumps(head)})
    return data


def read_message(path: Path) -> TrainerMessage:
    """The message in a file that holds `message_to_bytes`.

    Raises:
        RunStopped: the file is damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads(file.metadata()["message"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunStopped(f"the message in {path} is damaged ({error}); resume the run") from error
    ends = np.cumsum(tensors.pop("lengths"))[:-1]
    pieces: dict[str, Any] = {name: np.split(array, ends) for name, array in tensors.items()}
    streams = [name for name in pieces if name not in _ARRAYS]
    samples = tuple(
        TrainingSample(
            **{name: pieces[name][i] for name in _ARRAYS}, **{name: head[name][i] for name in _NAMES},
            logprob_streams={name.removesuffix(_STREAM): pieces[name][i] for name in streams},
        )
        for i in range(len(head[_NAMES[0]]))
    )  # fmt: skip
    folder = None if head["folder"] is None else Path(head["folder"])
    return TrainerMessage(
        kind=head["kind"], version=head["version"], samples=samples, checkpoint=head["checkpoint"], folder=folder
    )


def report_to_json(report: StepReport) -> dict[str, Any]:
    """Plain JSON values; floats keep every bit."""
    fields = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    return {
        **fields,
        "weights": str(report.weights),
        "metrics": dict(report.metrics),
        "probes": None if report.probes is None else _probes_to_json(report.probes),
        "state": None if report.state is None else str(report.state),
    }


def report_from_json(value: Mapping[str, Any]) -> StepReport:
    """The inverse of `report_to_json`."""
    changes = {
        "weights": Path(value["weights"]),
        "probes": None if value["probes"] is None else _probes_from_json(value["probes"]),
        "state": None if value["state"] is None else Path(value["state"]),
    }
    return StepReport(**{**value, **changes})


def ready_to_json(ready: TrainerReady) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "version": ready.version,
        "weights": ready.weights,
        "checkpoint": None if ready.checkpoint is None else str(ready.checkpoint),
        "probes": None if ready.probes is None else _probes_to_json(ready.probes),
    }


def ready_from_json(value: Mapping[str, Any]) -> TrainerReady:
    """The inverse of `ready_to_json`."""
    checkpoint = None if value["checkpoint"] is None else Path(value["checkpoint"])
    return TrainerReady(
        version=value["version"], weights=value["weights"], checkpoint=checkpoint,
        probes=None if value["probes"] is None else _probes_from_json(value["probes"]),
    )  # fmt: skip


def _probes_to_json(probes: Probes) -> dict[str, Sequence[Sequence[float]]]:
    return {"token_ids": [ids.tolist() for ids in probes.token_ids],
            "logprobs": [logprobs.tolist() for logprobs in probes.logprobs]}  # fmt: skip


def _probes_from_json(value: Mapping[str, Any]) -> Probes:
    return Probes(
        token_ids=tuple(np.array(ids, dtype=np.int32) for ids in value["token_ids"]),
        logprobs=tuple(np.array(logprobs, dtype=np.float32) for logprobs in value["logprobs"]),
    )
