"""Saves and loads the optimizer's state as safetensors: a single process writes the whole state; each of several ranks
writes its own rows.

```
optimizer.safetensors                      one process: {parameter}/{step, exp_avg, exp_avg_sq}
optimizer-00002-of-00003.safetensors       rank 1 of 3: the same keys, with only this rank's rows of the moments
```

The metadata of a rank's file has the key `rows`, a JSON object: for each parameter, the index of the file's first row
and the parameter's full shape. With this, a state can be loaded by a number of processes different from the number that
saved it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from verbatim.core.errors import CheckpointError, FormatError
from verbatim.core.formats import METADATA_KEY, check_metadata, metadata_of
from verbatim.core.machine_faults import rust_errors_as_oserror
from verbatim.models.shards import local_rows

OPTIMIZER_FILE = "optimizer.safetensors"
_KIND = "optimizer*.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_file(rank: int, size: int) -> str:
    """The file name for the state of one rank of `size`.

    >>> optimizer_file(0, 1), optimizer_file(1, 3)
    ('optimizer.safetensors', 'optimizer-00002-of-00003.safetensors')
    """
    return OPTIMIZER_FILE if size == 1 else f"optimizer-{rank + 1:05d}-of-{size:05d}.safetensors"


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: its rows if the tensor is sharded, otherwise all of it."""
    return local_rows(tensor)[0]


def save_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, *, rank: int = 0, size: int = 1
) -> None:
    """Write the optimizer state of every parameter that has a state. Every rank calls this function and writes its own
    file."""
    tensors: dict[str, Tensor] = {}
    rows: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = local(value.detach()).cpu().contiguous()
            rows[name] = [local_rows(parameter)[1], list(parameter.shape)]
    path = folder / optimizer_file(rank, size)
    metadata = metadata_of(_KIND) | ({} if size == 1 else {"rows": json.dumps(rows)})
    with rust_errors_as_oserror(path):
        save_file(tensors, path, metadata=metadata)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path) -> None:
    """Load what `save_optimizer` wrote, bit for bit.

    Raises:
        CheckpointError: the file is missing, has another format version, or belongs to another model; the optimizer is
            then unchanged.
    """
    with contextlib.ExitStack() as stack:
        saved = _Saved(folder, stack)
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in model.named_parameters():
            if name in saved.parameters:  # a parameter that never had a gradient has no state
                state[parameter] = saved.state_of(name, parameter)
        unknown = saved.parameters - {name for name, _ in model.named_parameters()}
    if unknown:
        raise CheckpointError(
            f"{saved.where} has state of {len(unknown)} parameters that this model does not have, for example "
            f"{min(unknown)!r}; resume with the model the checkpoint was made with"
        )
    optimizer.state.clear()
    optimizer.state.update(state)


class _Saved:
    """The open files of one saved state. Tensors are read on demand, so a rank reads only its own rows."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._files: list[tuple[Any, Mapping[str, Any]]] = []
        self._file_of: dict[str, list[int]] = {}
        paths = _paths(folder)
        self.where = paths[0]
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                metadata = file.metadata() or {}
                check_metadata(_KIND, metadata.get(METADATA_KEY), path)
                rows = json.loads(metadata.get("rows", "{}"))
            except FormatError:
                raise
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{path} is not a readable optimizer state: {error}") from error
            self._files.append((file, rows))
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                self._file_of.setdefault(key, []).append(len(self._files) - 1)
        self.parameters = {key.rpartition("/")[0] for key in self._file_of}

    def state_of(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        found = {key: self._moment(f"{name}/{key}", name, parameter) for key in _MOMENTS}
        if places := self._file_of.get(f"{name}/step"):
            found["step"] = self._files[places[0]][0].get_tensor(f"{name}/step").to(parameter.device)
        return found

    def _moment(self, key: str, name: str, parameter: Tensor) -> Tensor:
        """This process's rows of a moment, joined from the files that hold at least one of these rows."""
        mine, begin = local_rows(parameter)
        end = begin + (mine.shape[0] if mine.ndim else 0)
        pieces, covered, found = [], begin, None
        for number in self._file_of.get(key, []):
            file, rows = self._files[number]
            piece = file.get_slice(key)
            start, shape = rows.get(name, [0, piece.get_shape()])
            stop = start + (piece.get_shape()[0] if piece.get_shape() else 0)
            found = f"{piece.get_dtype()} {shape}"
            if list(shape) != list(parameter.shape):
                break
            if not mine.ndim:
                return self._checked(file.get_tensor(key), key, parameter)
            if max(begin, start) < min(end, stop):
                assert max(begin, start) == covered, f"{key}: the rows from {covered} on are missing"
                covered = min(end, stop)
                pieces.append(piece[max(begin, start) - start : covered - start])
        else:
            if found is not None and covered == end:
                whole = torch.zeros_like(parameter)
                if pieces:
                    local(whole).copy_(self._checked(torch.cat(pieces), key, parameter))
                return whole
        raise CheckpointError(
            f"{self.where}: {key} is {found or 'missing'}, but the model's parameter is {_describe(parameter)}; resume "
            "with the model and dtype the checkpoint was made with"
        )

    def _checked(self, value: Tensor, key: str, parameter: Tensor) -> Tensor:
        if value.dtype != parameter.dtype:
            raise CheckpointError(
                f"{self.where}: {key} is {_describe(value)}, but the model's parameter is {_describe(parameter)}; "
                "resume with the model and dtype the checkpoint was made with"
            )
        return value.to(parameter.device)


def _paths(folder: Path) -> list[Path]:
    """The files of a saved state: one, or one per rank.

    Raises:
        CheckpointError: a rank's file is missing.
    """
    parts = sorted(folder.glob("optimizer-*-of-*.safetensors"))
    if not parts:
        return [folder / OPTIMIZER_FILE]
    match = re.fullmatch(r"optimizer-\d+-of-(\d+)\.safetensors", parts[0].name)
    size = int(match[1]) if match else 0
    expected = [folder / optimizer_file(rank, size) for rank in range(size)]
    if parts != expected:
        raise CheckpointError(
            f"{folder} has the optimizer state of {len(parts)} processes, expected {size}: "
            f"{', '.join(path.name for path in parts)[:200]}"
        )
    return parts


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
