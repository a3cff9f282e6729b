"""Reads LoRA adapters in `peft`'s format, and merges them into the weights of their base model.

An adapted layer computes `W x + scale * B (A x)`. Legend: R rank, I inputs, O outputs of a layer; A is [R, I], B is
[O, R], W is [O, I] (transposed in GPT-2's layers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from verbatim.core.errors import FormatError, ModelError
from verbatim.core.formats import content_of
from verbatim.models.loading import load_model, load_tokenizer, refuse_not_finite, replace_weights, save_model
from verbatim.models.shards import local_rows, reading
from verbatim.models.source import ADAPTER_CONFIG, is_adapter

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix that `peft` adds to module names."""
BASE_FILE, BASE_FINGERPRINT, ROUNDED_FINGERPRINT = "base_model.json", "fingerprint", "fingerprint_bfloat16"
"""Name of the file that Verbatim writes next to `peft`'s files, and its two keys: the fingerprint of the adapter's base
weights, and the fingerprint of the same base weights rounded to bfloat16, for a sampler that keeps its weights in
bfloat16."""
_ENDS = (".lora_A.weight", ".lora_B.weight")
_PLAIN = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""The `peft` settings of plain LoRA: a layer becomes `W x + alpha / r * B A x`, and nothing else changes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """A LoRA adapter, read from a folder in `peft`'s format."""

    folder: Path
    """The folder that the adapter was read from."""
    base: str
    """The folder or hub id of the adapter's base model."""
    r: int
    """The rank."""
    scale: float
    """The factor by which `B A` is multiplied: alpha / r."""
    transposed: bool
    """True if the base model stores its weights as [I, O]."""
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A and B of each adapted layer, by the layer's name in the model."""
    base_fingerprint: str | None
    """Fingerprint of the base model's weights, or None if another program wrote the folder."""
    rounded_fingerprint: str | None
    """Fingerprint of the base weights rounded to bfloat16, or None if another program wrote the folder."""


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter in a folder.

    Raises:
        FormatError: another version of Verbatim wrote the adapter.
        ModelError: a file is missing or damaged, a value is not finite, or the adapter is not plain LoRA.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        r, alpha, base = int(config["r"]), float(config["lora_alpha"]), str(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} does not describe an adapter: {error!r}; expected a folder that a run with [trainer.lora] wrote"
        ) from error
    other = [f"{key} = {config[key]!r}" for key, plain in _PLAIN.items() if config.get(key, plain) not in (plain, None)]
    if other:
        raise ModelError(f"{folder}: {', '.join(other)} cannot be merged; expected an adapter of plain LoRA")
    with reading(folder / ADAPTER_WEIGHTS):
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    refuse_not_finite(tensors.items(), str(folder))
    whole, rounded = _fingerprints_in(folder / BASE_FILE)
    return Adapter(
        folder=folder,
        base=base,
        r=r,
        scale=alpha / r,
        transposed=bool(config.get("fan_in_fan_out")),
        pairs=_pairs(folder, tensors),
        base_fingerprint=whole,
        rounded_fingerprint=rounded,
    )


def _fingerprints_in(path: Path) -> tuple[str | None, str | None]:
    if not path.is_file():
        return None, None
    try:
        found = content_of(BASE_FILE, json.loads(path.read_text(encoding="utf-8")), path)
        return str(found[BASE_FINGERPRINT]), str(found[ROUNDED_FINGERPRINT])
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error!r}") from error


def _pairs(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted layer, by the layer's name in the model."""
    halves: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, tensor in tensors.items():
        end = next((i for i, end in enumerate(_ENDS) if name.startswith(PREFIX) and name.endswith(end)), None)
        if end is None:
            raise ModelError(f"{folder}: {name} is not the A or B of a linear layer")
        halves[end][name.removeprefix(PREFIX).removesuffix(_ENDS[end])] = tensor
    alone = sorted(halves[0].keys() ^ halves[1].keys())
    if alone or not tensors:
        raise ModelError(f"{folder}: " + (f"{alone[0]} has only one of A and B" if alone else "it is empty"))
    return {name: (a_RI, halves[1][name]) for name, a_RI in halves[0].items()}


def merged_weight(weight: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """`W + scale * B A` in the dtype of W, computed in at least float32 and rounded once."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a_RI, b_OR = a_RI.to(weight.device, dtype), b_OR.to(weight.device, dtype)
    left, right = (a_RI.T, b_OR.T) if transposed else (b_OR, a_RI)
    return torch.addmm(weight.to(dtype), left, right, alpha=scale).to(weight.dtype)


class BaseWeights:
    """Keeps the base weights of a model's adapted layers, so that every adapter version is merged from the base.

    The merged weights then depend only on the base model and the current adapter. Subtracting the previous adapter
    instead would leave its rounding errors behind. The copy takes as much memory as the adapted layers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}
        self._fingerprint: str | None = None
        """Fingerprint of the base weights, or None if not computed yet."""

    def merged(self, adapter: Adapter) -> dict[str, Tensor]:
        """The merged weights of the adapted layers, for `replace_weights`. The model is not changed.

        Raises:
            ModelError: the adapter has layers that the model lacks, or layers whose shape differs from the model's, or
                the adapter belongs to other base weights.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, (a_RI, b_OR) in adapter.pairs.items():
            shape = (b_OR.shape[0], a_RI.shape[1])
            found = own.get(f"{name}.weight")
            if found is None or tuple(found.shape) != (shape[::-1] if adapter.transposed else shape):
                what = "no such layer" if found is None else f"a layer of {list(found.shape)}"
                raise ModelError(
                    f"{adapter.folder} does not fit the model: it changes {name} {list(shape)}, and the "
                    f"model has {what}"
                )
        self._refuse_another_base(adapter)
        weights = dict(self._kept)  # layers that only earlier adapters changed get their base weights back
        for name, (a_RI, b_OR) in adapter.pairs.items():
            key = f"{name}.weight"
            base = self._kept.setdefault(key, own[key].detach().clone())
            weights[key] = merged_weight(base, a_RI, b_OR, adapter.scale, transposed=adapter.transposed)
        refuse_not_finite(weights.items(), str(adapter.folder))
        return weights

    def _refuse_another_base(self, adapter: Adapter) -> None:
        dtype = self._model.dtype
        expected = adapter.rounded_fingerprint if dtype == torch.bfloat16 else adapter.base_fingerprint
        if expected is None or dtype not in (torch.float32, torch.bfloat16):
            return  # no fingerprint to compare: another program wrote the adapter, or this dtype has none
        if self._fingerprint is None:
            named = ((name, self._kept.get(name, value)) for name, value in self._model.named_parameters())
            # Round all tensors to the dtype, because some model classes keep a few parameters of a bfloat16 model in
            # float32.
            self._fingerprint = fingerprint(named, dtype=torch.bfloat16 if dtype == torch.bfloat16 else None)
        if self._fingerprint != expected:
            raise ModelError(
                f"the adapter in {adapter.folder} was not trained on this model's weights but on those of "
                f"{adapter.base}; restore those weights"
            )

    def forget(self) -> None:
        """Forget the base weights after full weights have been loaded. The loaded weights then are the new base."""
        self._kept, self._fingerprint = {}, None


def load_base_of(adapter: Adapter, **how: Any) -> Any:
    """Load the adapter's base model with `load_model(**how)`.

    Raises:
        ModelError: the base model is missing or cannot be loaded.
    """
    try:
        return load_model(adapter.base, **how)
    except ModelError as error:
        raise ModelError(
            f"{error}. {adapter.folder / ADAPTER_CONFIG} names this base model; if the model was moved, change "
            "base_model_name_or_path in that file"
        ) from error


def save_merged(adapter_folder: Path, folder: Path) -> None:
    """Merge an adapter into its base model, and write float32 weights and tokenizer for `from_pretrained`.

    Raises:
        ModelError: the adapter or its base model cannot be read.
        OSError: the system refused to write.
    """
    adapter = read_adapter(adapter_folder)
    model = load_base_of(adapter, only_attention=False)
    replace_weights(model, BaseWeights(model).merged(adapter))
    save_model(model, load_tokenizer(adapter_folder), folder)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(
    tensors: Iterable[tuple[str, Tensor]],
    total: Callable[[Tensor], Tensor] = lambda sums: sums,
    dtype: torch.dtype | None = None,
) -> str:
    """A digest of the tensors' names, dtypes, shapes and values. A different model has a different digest, but the
    digest is not tamper-proof.

    The digest uses a tensor's values only through one number: the sum of their bit patterns, read as integers. The sum
    is computed at memory speed, and the sums of a tensor's shards add up to the sum of the whole tensor.

    Args:
        tensors: Pairs of name and tensor.
        total: Sums int64 values over all processes that hold shards. All these processes have to call this function.
        dtype: Fingerprint the tensors as if they were rounded to this dtype.
    """
    named = sorted(tensors, key=lambda each: each[0])
    zero = torch.zeros((), dtype=torch.int64, device="cpu")  # `stack` needs a tensor, and a process may have none
    sums = [zero, *(_sum_of_bytes(local_rows(tensor)[0].detach().to(dtype or tensor.dtype)) for _, tensor in named)]
    found = hashlib.sha256()
    for (name, tensor), value in zip(named, total(torch.stack(sums)).tolist()[1:], strict=True):
        found.update(f"{name} {dtype or tensor.dtype} {list(tensor.shape)} {value % 2**64};".encode())
    return found.hexdigest()[:32]


def _sum_of_bytes(value: Tensor) -> Tensor:
    # Bit patterns are summed, not values: integer sums are exact in any order, on any device and over any shards.
    if value.is_floating_point():
        value = value.contiguous().view(_INTEGERS[value.itemsize])
    return value.sum(dtype=torch.int64).cpu()


__all__ = [
    "ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "BASE_FILE", "BASE_FINGERPRINT", "PREFIX", "ROUNDED_FINGERPRINT", "Adapter",
    "BaseWeights", "fingerprint", "is_adapter", "load_base_of", "merged_weight", "read_adapter", "save_merged",
]  # fmt: skip
