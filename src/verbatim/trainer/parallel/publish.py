"""Writes the weights of a sharded model as a Hugging Face folder, or broadcasts them, a few layers at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from verbatim.core.errors import SamplerFault
from verbatim.core.machine_faults import describe, rust_errors_as_oserror
from verbatim.models.shards import whole
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.parallel.ranks import Ranks

SMALL_FILE = 64 << 20
"""Layers are combined into one file up to this many bytes."""


def save_sharded(model: Any, tokenizer: Any, folder: Path, ranks: Ranks) -> None:
    """Write a folder that `from_pretrained` loads. All ranks call it; rank 0 writes.

    Rank 0 holds the tensors of one file at a time: one layer, or several up to `SMALL_FILE`. A model that fits into one
    file is written as one file, as a single process would; a larger model gets an index.

    Raises:
        RunStopped: the system refused to write on rank 0 (disk full, no permission). Raised on all ranks.
    """
    plan = list(_files(model))
    names = [_file_name(number, len(plan)) for number in range(len(plan))]
    index: dict[str, str] = {}
    num_bytes = 0
    error: OSError | None = None
    parts = _gathered(model, plan, ranks)
    for file_name in names:
        gathered = next(parts)
        if gathered is None or error is not None:
            continue  # gathering is collective: every rank has to take part to the end, even after an error
        saved = {name: tensor.cpu().contiguous() for name, tensor in gathered.items()}
        del gathered  # frees device memory before the next file is gathered
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with rust_errors_as_oserror(folder / file_name):
                save_file(saved, folder / file_name, metadata={"format": "pt"})
        except OSError as refused:
            error = refused
        index.update(dict.fromkeys(saved, file_name))
        num_bytes += sum(tensor.nbytes for tensor in saved.values())

    def finish() -> None:
        if error is not None:
            raise error
        if ranks.leads:
            _write_the_rest(model, tokenizer, folder, index if len(plan) > 1 else {}, num_bytes)

    ranks.agree(finish)


class Receivers(Protocol):
    """The receivers of a broadcast. Each receiver gets every tensor."""

    def send(self, name: str, tensor: Tensor) -> None:
        """Send a whole tensor. Calls come in the order of `published_layout`. The tensor may be overwritten after the
        call.

        Raises:
            SamplerFault: the receivers failed.
        """


def send_sharded(model: Any, receivers: Receivers | None, ranks: Ranks | None) -> None:
    """Send the weights to vLLM's workers, with the names and shapes that `save_sharded` would write. All ranks call
    this and take part in gathering. Only rank 0 has receivers, and rank 0 holds one layer at a time.

    If the receivers fail, sending stops, but the ranks gather the rest of the weights to stay in step.

    Raises:
        SamplerFault: the receivers failed, or rank 0 had no memory for a tensor. Raised on all ranks.
    """
    error: SamplerFault | None = None
    for gathered in _gathered(model, _units(model), ranks):
        while gathered:  # popped one by one, so that each tensor's memory is freed once it is sent
            name = next(iter(gathered))
            tensor = gathered.pop(name)
            if error is None:
                error = _send(receivers, name, tensor)

    def finish() -> None:
        if error is not None:
            raise error

    if ranks is None:
        finish()
    else:
        ranks.agree(finish)


def _send(receivers: Receivers | None, name: str, tensor: Tensor) -> SamplerFault | None:
    """Send a tensor. If sending fails, the fault is returned, not raised: the other ranks are still gathering, and an
    error on rank 0 alone would leave them waiting."""
    assert receivers is not None
    try:
        receivers.send(name, tensor.contiguous())
    except SamplerFault as fault:
        return fault
    except (OSError, RuntimeError, MemoryError) as error:
        return SamplerFault(f"{name} could not be sent: {describe(error) or type(error).__name__}")
    return None


def published_layout(model: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor that `send_sharded` sends, in the order of sending. Computed without
    gathering."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for unit in _units(model):
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in unit.items()}
        found.update({name: (t.dtype, tuple(t.shape)) for name, t in _as_published(model, empty).items()})
    return found


def _as_published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one unit under their names in a saved folder. They are sorted by name, because the order in
    `transformers` varies."""
    return dict(sorted(revert_weight_conversion(model, tensors).items()))


def _gathered(
    model: Any, parts: Sequence[Mapping[str, Tensor]], ranks: Ranks | None
) -> Iterator[dict[str, Tensor] | None]:
    """An iterator that gathers one part at a time. On rank 0 it returns the part's whole tensors by their published
    names, on other ranks None. The other ranks must iterate too, because gathering is collective."""

    def gather(part: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        gathered = {name: whole(tensor.detach()) for name, tensor in part.items()}
        return _as_published(model, gathered) if ranks is None or ranks.leads else None

    return map(gather, parts)  # not a generator, whose frame would hold one part while the next is gathered


def _files(model: Any) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file: consecutive units, combined up to `SMALL_FILE` or, if larger, the size of the largest
    unit."""
    units = _units(model)
    room = max([SMALL_FILE, *(_num_bytes(unit) for unit in units)])
    file: dict[str, Tensor] = {}
    for unit in units:
        if file and _num_bytes(file) + _num_bytes(unit) > room:
            yield file
            file = {}
        file.update(unit)
    yield file


def _units(model: Any) -> list[dict[str, Tensor]]:
    """The units of gathering: each layer, and each tensor outside the layers. A layer stays together, because
    `transformers` may save several of its tensors as one."""
    layers = {module: number for number, module in enumerate(decoder_layers(model))}
    prefixes = {f"{name}.": layers[module] for name, module in model.named_modules() if module in layers}
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    units: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name not in left_out:
            key = next((number for prefix, number in prefixes.items() if name.startswith(prefix)), name)
            units.setdefault(key, {})[name] = tensor
    return list(units.values())


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_the_rest(model: Any, tokenizer: Any, folder: Path, index: Mapping[str, str], num_bytes: int) -> None:
    """Write everything but the weights: index, configuration, generation configuration and tokenizer."""
    with rust_errors_as_oserror(folder):
        if index:
            about = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(index.items()))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
