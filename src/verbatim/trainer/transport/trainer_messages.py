"""The format of messages to the trainer and of its answers, which are numbered files.

```
exchange/{session}/
    config.toml                     the trainer's configuration, which must equal the orchestrator's
    ready.json                      the trainer's state; once it exists, the trainer accepts messages
    attached                        created by the orchestrator of the session; there is only one
    trainer.json orchestrator.json  heartbeats
    messages/000001.safetensors     a request, with a batch if it is to be trained
    answers/000001.json             its result
    cores                           which side is computing, if both share a machine's cores
    states/v000025/ the trainer's part of a checkpoint, until the orchestrator moves it into the checkpoint
```

Answers name folders relative to the run folder, `{"in_run": "weights/v000025"}`, because the run folder may have
another path on the orchestrator's host.

The trainer executes messages in the order of their numbers, one at a time. A session has one process on each side: the
files of a killed process are never read again.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from verbatim.core.errors import RunStopped
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, WeightStore
from verbatim.trainer.transport.canary import Probes
from verbatim.trainer.transport.sample_tensors import samples_from_tensors, samples_to_tensors
from verbatim.trainer.transport.trainer_link import StepReport, TrainerReady

_OF_TOKENS = ("logprobs", "gradients")
"""Fields of `TrainedTokens`, float32. Answers contain their bytes in base64."""
_TYPES = {"bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"}
_NUMPY = {name: np.dtype(dtype) for dtype, name in _TYPES.items()}
_ALIGNED = 8
"""Alignment of the tensor data in bytes; the header is padded with spaces."""
IN_RUN = "in_run"
"""JSON key of a path relative to the run folder."""
_FOLDERS = {"weights", "state", "checkpoint"}
"""Fields of answers that contain folders."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerMessage:
    """A request to the trainer."""

    kind: Literal["train", "save", "send", "stop"]
    """What to do: train on a batch, save the state, send weights to the sampler's servers, or end."""
    version: int = 0
    """For "train", the policy version after the batch; for "save" and "send", the version to save or send."""
    samples: tuple[TrainingSample, ...] = ()
    """The batch, for "train"."""
    checkpoint: bool = False
    """True to also write the trainer's part of a checkpoint, for "train"."""
    order: SendOrder | None = None
    """The receivers of the weights, for "send"."""


def message_to_bytes(message: TrainerMessage) -> bytes:
    """The `message_parts` of a message, concatenated."""
    return b"".join(message_parts(message))


def message_parts(message: TrainerMessage) -> Iterator[memoryview]:
    """The content of the safetensors file for a message, in parts: samples as tensors, everything else as metadata."""
    tensors, names = samples_to_tensors(message.samples)
    head = {
        "kind": message.kind,
        "version": message.version,
        "checkpoint": message.checkpoint,
        "order": None if message.order is None else dataclasses.asdict(message.order),
        **names,
    }
    return _tensor_file(tensors, {"message": json.dumps(head)})


def read_message(path: Path) -> TrainerMessage:
    """Read a message from a file that holds the message's `message_parts`.

    Raises:
        RunStopped: the file is damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            head = json.loads(file.metadata()["message"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        return _message(head, tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunStopped(f"the message in {path} is damaged ({error}); resume the run") from error


def read_message_bytes(content: memoryview) -> TrainerMessage:
    """Read a message from the bytes of its `message_parts`. Tensors are views of `content`, not copies.

    Raises:
        RunStopped: the message is damaged.
    """
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8 : 8 + length]))
        head, body = json.loads(header.pop("__metadata__")["message"]), content[8 + length :]
        tensors = {}
        for name, about in header.items():
            start, end = about["data_offsets"]
            tensors[name] = np.frombuffer(body[start:end], _NUMPY[about["dtype"]]).reshape(about["shape"])
        return _message(head, tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise RunStopped(f"a message to the trainer is damaged ({error}); resume the run") from error


def _message(head: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> TrainerMessage:
    samples = samples_from_tensors(tensors, head)
    return TrainerMessage(
        kind=head["kind"],
        version=head["version"],
        samples=samples,
        checkpoint=head["checkpoint"],
        order=None if head["order"] is None else SendOrder(**head["order"]),
    )


def to_json(record: StepReport | TrainerReady, run: Path) -> dict[str, Any]:
    """A record as plain JSON values; floats keep every bit. `run` is the writer's run folder."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    fields.update({name: path_to_json(fields[name], run) for name in _FOLDERS & fields.keys()})
    if record.probes is not None:
        fields["probes"] = {
            "token_ids": [ids.tolist() for ids in record.probes.token_ids],
            "logprobs": [logprobs.tolist() for logprobs in record.probes.logprobs],
            "rounding": record.probes.rounding,
        }
    if isinstance(record, TrainerReady) and record.store is not None:
        fields["store"] = dataclasses.asdict(record.store)
    if isinstance(record, StepReport) and record.tokens is not None:
        fields["tokens"] = {name: _to_text(getattr(record.tokens, name)) for name in _OF_TOKENS}
    return fields


def report_from_json(value: Mapping[str, Any], run: Path) -> StepReport:
    """The inverse of `to_json` for a report; `run` is the reader's run folder.

    Raises:
        RunStopped: a relative path leads out of the run folder.
    """
    weights = path_from_json(value["weights"], run)
    assert weights is not None
    changes = {
        "weights": weights,
        "probes": _probes(value["probes"]),
        "state": path_from_json(value["state"], run),
        "tokens": _tokens(value.get("tokens")),
    }
    return StepReport(**{**value, **changes})


def ready_from_json(value: Mapping[str, Any], run: Path) -> TrainerReady:
    """The inverse of `to_json` for a `TrainerReady`; `run` is the reader's run folder.

    Raises:
        RunStopped: a relative path leads out of the run folder.
    """
    checkpoint, weights = (path_from_json(value[name], run) for name in ("checkpoint", "weights"))
    changes = {
        "checkpoint": checkpoint,
        "weights": str(weights),
        "probes": _probes(value["probes"]),
        "store": None if value["store"] is None else WeightStore(**value["store"]),
    }
    return TrainerReady(**{**value, **changes})


def path_to_json(path: Path | str | None, run: Path) -> dict[str, str] | str | None:
    """A folder in the run folder as `{"in_run": "weights/v000012"}`; any other folder, or a hub id, unchanged."""
    if path is None:
        return None
    absolute, folder = Path(path), run.resolve()
    if not (absolute.is_absolute() and absolute.is_relative_to(folder)):
        return str(path)
    return {IN_RUN: absolute.relative_to(folder).as_posix()}


def path_from_json(value: Mapping[str, str] | str | None, run: Path) -> Path | None:
    """The inverse of `path_to_json`.

    Raises:
        RunStopped: a relative path leads out of the run folder.
    """
    if value is None or isinstance(value, str):
        return None if value is None else Path(value)
    name = PurePosixPath(value[IN_RUN])
    if name.is_absolute() or ".." in name.parts:
        raise RunStopped(f"the trainer's answer names the folder {name}, expected one below {run}")
    return run.resolve() / name


def _to_text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _tokens(value: Mapping[str, str] | None) -> TrainedTokens | None:
    if value is None:
        return None
    return TrainedTokens(**{name: np.frombuffer(base64.b64decode(value[name]), np.float32) for name in _OF_TOKENS})


def _probes(value: Mapping[str, Any] | None) -> Probes | None:
    if value is None:
        return None
    return Probes(
        token_ids=tuple(np.array(ids, dtype=np.int32) for ids in value["token_ids"]),
        logprobs=tuple(np.array(logprobs, dtype=np.float32) for logprobs in value["logprobs"]),
        rounding=value.get("rounding"),
    )


def _tensor_file(tensors: Mapping[str, Sequence[NDArray[Any]]], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The content of a safetensors file, in parts. Tensors are given in parts too and are never concatenated in memory,
    although safetensors' own writer would require that.

    The format: the header's length as uint64, the header as JSON (dtype, shape and offsets of each tensor, and
    metadata), then the bytes of all tensors (https://huggingface.co/docs/safetensors).

    Args:
        tensors: For each tensor name, the arrays to concatenate along the first dimension to get the tensor; at least
            one array.
        metadata: The metadata, as strings by name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Tensors with the largest items come first, so that every tensor is aligned to its item size without padding in
    # between.
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    end = 0
    for name in ordered:
        parts = tensors[name]
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        assert all(part.dtype == parts[0].dtype and part.shape[1:] == parts[0].shape[1:] for part in parts)
        header[name] = {"dtype": _TYPES[parts[0].dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in ordered:
        for part in tensors[name]:
            if part.nbytes:
                yield np.ascontiguousarray(part).data.cast("B")
