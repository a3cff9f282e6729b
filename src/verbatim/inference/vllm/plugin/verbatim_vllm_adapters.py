"""Takes the digests of a low-rank adapter where the kernels read it: in its slot of every layer.

vLLM multiplies B by the scale when it loads an adapter, so B is scaled here.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from verbatim_vllm_digest import digest
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)

Piece = tuple[int, int, Tensor]
"""The dimension along which it is a part of the file's tensor, where it begins there, and its values."""
PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


def newest(manager: Any) -> int | None:
    """The id of the adapter that was loaded last; ids only grow."""
    return max(manager.list_adapters(), default=None)


def report(manager: Any) -> dict[str, Any]:
    """What the newest adapter is made of, in the format of `verbatim_vllm_watch.Watch.report`.

    Args:
        manager: The worker's manager of adapters.
    """
    found: dict[str, Any] = {
        "path": None,
        "error": None,
        "loaded": True,
        "tensors": [],
        "stale": [],
        "unmapped": [],
        "seconds": 0.0,
    }
    adapter = newest(manager)
    if adapter is None or adapter not in manager.lora_index_to_id:
        return {**found, "error": "no adapter is in use", "loaded": False}
    slot, rank = manager.lora_index_to_id.index(adapter), manager.get_adapter(adapter).rank
    for name, layer in manager.modules.items():
        members = manager.packed_modules.get(name, [name])
        known = isinstance(layer, ColumnParallelLinearWithLoRA | RowParallelLinearWithLoRA | ReplicatedLinearWithLoRA)
        if not known or len(members) != layer.n_slices:
            continue
        for member, tensors in zip(members, _slices(layer, slot, rank), strict=True):
            if all(not bool(tensor.any()) for _, _, tensor in tensors):
                continue  # this layer is not adapted
            for end, (dim, start, tensor) in zip(ENDS, tensors, strict=True):
                found["tensors"].append(
                    [
                        PREFIX + member + end,
                        dim,
                        start,
                        list(tensor.shape),
                        str(tensor.dtype).removeprefix("torch."),
                        digest(tensor.contiguous()),
                        "live",
                    ]
                )
    return found


def _slices(layer: nn.Module, slot: int, rank: int) -> Iterator[tuple[Piece, Piece]]:
    """A and B of each part of a fused layer."""
    by_input = isinstance(layer, RowParallelLinearWithLoRA)
    whole = layer.tp_rank if isinstance(layer, ColumnParallelLinearWithLoRA) else 0
    parts = getattr(layer, "output_ids", [whole] * layer.n_slices)
    for i in range(layer.n_slices):
        a, b = layer.lora_a_stacked[i][slot, 0, :rank], layer.lora_b_stacked[i][slot, 0, :, :rank]
        yield (int(by_input), layer.tp_rank * a.shape[1] if by_input else 0, a), (0, parts[i] * b.shape[0], b)
