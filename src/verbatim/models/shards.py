"""Builds a model on the meta device and fills its parameters from a folder; each process reads only its own rows.

No process ever holds the whole model. A process holds at most one whole tensor at a time, while it assembles that
tensor from several tensors of the folder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verbatim.core.errors import ModelError
from verbatim.models.conversion import sources_of, to_model_tensors

logger = logging.getLogger(__name__)

_FILES: Mapping[str, Any] = {"allow_patterns": ["*.safetensors"], "ignore_patterns": ["*/*", "consolidated*"]}
"""The files to download from the hub. The excluded files (`consolidated*` of Mistral's models, subfolders of gpt-oss)
hold the same weights in another layout."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a `ModelError` if a safetensors file cannot be read in the block."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error


def own_tensors(model: Any) -> dict[str, Tensor]:
    """A model's parameters (tied parameters under each of their names), and the buffers that are saved with the
    model."""
    own = dict(model.named_parameters(remove_duplicate=False))
    own.update({name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()})
    return own


def empty_model(source: str, dtype: torch.dtype) -> Any:
    """A model with parameters on the meta device. Its buffers have values, because folders do not contain buffers."""
    config = AutoConfig.from_pretrained(source)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with contextlib.suppress(OSError):  # generation_config.json is optional
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The rows of a tensor that this process holds (all rows if it is not sharded), and the index of the first of these
    rows."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())  # rounded up, as DTensor does: the last processes may hold fewer rows
    return tensor.to_local(), min(rows * mesh.get_local_rank(), tensor.shape[0])


@torch.no_grad()
def fill(model: Any, source: str) -> None:
    """Copy the weights of a folder or hub id into a model's parameters and saved buffers. Only this process's rows are
    copied.

    Raises:
        ModelError: a file cannot be read, or a tensor is missing or of another shape.
    """
    folder = Path(source if Path(source).is_dir() else snapshot_download(source, **_FILES))
    with contextlib.ExitStack() as stack:
        file_of: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with reading(path):
                file = stack.enter_context(safe_open(path, framework="pt"))
            file_of.update(dict.fromkeys(file.keys(), file))
        if not file_of:
            raise ModelError(f"{folder} contains no *.safetensors")
        _fill(model, file_of, str(folder))


def _fill(model: Any, file_of: Mapping[str, Any], where: str) -> None:
    """Fill a model tensor by tensor. Renamed tensors are read as slices, converted tensors (fused experts) as a
    whole."""
    own = own_tensors(model)
    tied = dict(model.all_tied_weights_keys)
    filled: set[str] = set()
    sources, unknown = sources_of(model, file_of)
    for name, found in sources.items():
        if len(found) == 1 and found[0][1] is None:
            piece = file_of[found[0][0]].get_slice(found[0][0])
            made = {name: (piece, tuple(piece.get_shape()))}
        else:
            converted, _ = to_model_tensors(model, {key: file_of[key].get_tensor(key) for key, _ in found})
            made = {target: (value, tuple(value.shape)) for target, value in converted.items()}
        for target, (value, shape) in made.items():
            filled.add(target)
            if tied.get(target) not in own:  # else the tied tensor is copied instead, as in from_pretrained
                _copy(own[target], value, shape, f"{where}: {target}")
    missing = [name for name in own if name not in filled and tied.get(name) not in filled]
    if missing:
        raise ModelError(f"{where} does not fit the model: missing {missing[:3]}")
    if unknown:
        logger.warning("%s has %d tensors that the model does not have: %s", where, len(unknown), unknown[:3])


def _copy(tensor: Tensor, value: Any, shape: tuple[int, ...], where: str) -> None:
    if shape != tuple(tensor.shape):
        raise ModelError(f"{where} has the shape {list(shape)}, the model's {list(tensor.shape)}")
    copy_rows(tensor, value)


@torch.no_grad()
def copy_rows(tensor: Tensor, value: Any) -> None:
    """Copy this process's rows from a whole tensor or a safetensors slice into a tensor that may be sharded."""
    mine, first = local_rows(tensor)
    if mine.numel():
        mine.copy_(value[first : first + mine.shape[0]] if mine.ndim else value[...])


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor. A sharded tensor is gathered, so all processes must call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it.

    `torch.device("meta")` around the constructor would put the buffers there as well.
    """
    building = threading.get_ident()  # the hook is global, so torch also calls it for modules that other threads build

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != building:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        hook.remove()
