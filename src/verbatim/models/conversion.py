"""Converts tensors from the layout of a Hugging Face folder to the layout of the model, as `transformers` does.

`save_pretrained` writes the published layout of the architecture, which vLLM and other programs read. In that layout a
mixture-of-experts layer has one tensor per expert; in the model it has one fused tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from verbatim.core.errors import ModelError
from verbatim.core.machine_faults import is_out_of_memory


def to_model_tensors(model: Any, saved: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Convert tensors as `from_pretrained` does for this model: renamed, and stacked, split or transposed where needed.

    Example: a Mixtral's `model.layers.0.block_sparse_moe.experts.{0..7}.w1.weight` and `...w3.weight` become
    `model.layers.0.mlp.experts.gate_up_proj`.

    Args:
        model: A `transformers` model; it is not changed.
        saved: Tensors by their names in the folder, of any dtype.

    Returns:
        (the tensors by the model's names, the folder's names that the model does not have). Tensors that need no
        conversion are not copied. Shapes are not compared with the model's.

    Raises:
        ModelError: the tensors cannot be converted: a tensor is missing, or shapes do not match.
    """
    converter_of = {
        pattern: converter
        for converter in get_model_conversion_mapping(model)
        if isinstance(converter, WeightConverter)
        for pattern in converter.source_patterns
    }
    sources, unknown = sources_of(model, saved)
    saved_as: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    conversions: dict[str, Any] = {}
    for name, found in sources.items():
        for key, pattern in found:
            saved_as[name, pattern].append(key)
            if pattern is not None:
                # Copied, because a converter accumulates the tensors that are added to it.
                conversion = conversions.setdefault(name, deepcopy(converter_of[pattern]))
                conversion.add_tensor(name, key, pattern, saved[key])
    converted: dict[str, Tensor] = {}
    for (name, pattern), keys in saved_as.items():
        if pattern is not None:
            _refuse_gaps(name, keys)
        elif len(keys) > 1:
            raise ModelError(f"{keys[0]} and {keys[1]} both map to the model's {name}")
        else:
            converted[name] = saved[keys[0]]
    for name, conversion in conversions.items():
        try:
            made = conversion.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(f"the tensors of the model's {name} do not fit each other: {error}") from error
        for target, value in made.items():
            converted[target] = value[0] if isinstance(value, list) else value
    return converted, unknown


def sources_of(model: Any, keys: Iterable[str]) -> tuple[dict[str, list[tuple[str, str | None]]], list[str]]:
    """Return (1) for each tensor of the model, its sources in the folder, in stacking order, and (2) the folder's names
    that the model lacks.

    A source is a pair: the tensor's name in the folder, and the pattern of the tensor's conversion (None if the tensor
    is only renamed). If one conversion makes several of the model's tensors, its sources are listed under the first of
    them.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    unknown: list[str] = []
    sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for key in sorted(keys, key=dot_natural_key):  # in numerical order: expert 10 comes after expert 9
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:  # the folder already has the model's own name; do not rename it
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            unknown.append(key)
            continue
        sources[name].append((key, pattern))
    return sources, unknown


def _refuse_gaps(name: str, keys: Iterable[str]) -> None:
    """Refuse gaps between experts' numbers. The experts are stacked in order; if expert 3 were missing, expert 4 would
    silently become expert 3."""
    for numbers in zip(*([int(part) for part in key.split(".") if part.isdigit()] for key in keys), strict=False):
        found = sorted(set(numbers))
        if len(found) > 1 and found != list(range(len(found))):
            raise ModelError(
                f"the model's {name} is stacked from tensors 0 to {len(found) - 1}; the folder numbers them {found}"
            )
