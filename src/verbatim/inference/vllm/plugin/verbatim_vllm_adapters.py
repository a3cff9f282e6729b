"""Computes the digests of a LoRA adapter in the memory that the kernels read: the adapter's slot in every layer.

vLLM multiplies B by the scale when it loads an adapter, so the digest of B is computed from the scaled B.
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
"""A slice of the file's tensor, as (the sliced dimension, the index where the slice begins, the slice's values)."""
PREFIX, ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")


def newest(manager: Any) -> int | None:
    """Id of the adapter that was loaded last (ids only grow), or None if no adapter is loaded."""
    return max(manager.list_adapters(), default=None)


def report(manager: Any) -> dict[str, Any]:
    """The tensors of the newest adapter, in the format of `verbatim_vllm_watch.Watch.report`.

    Args:
        manager: The worker's adapter manager.
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
        # An unknown layer is left out. The client then finds that its tensors are missing, and refuses the update.
        if not known or len(members) != layer.n_slices:
            continue
        for member, tensors in zip(members, _slices(layer, slot, rank), strict=True):
            if all(not bool(tensor.any()) for _, _, tensor in tensors):
                continue  # all zeros: the adapter does not have this layer
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
    """The slices of A and B on this worker, for each part of a fused layer (tensor parallelism splits A or B)."""
    by_input = isinstance(layer, RowParallelLinearWithLoRA)
    whole = layer.tp_rank if isinstance(layer, ColumnParallelLinearWithLoRA) else 0
    parts = getattr(layer, "output_ids", [whole] * layer.n_slices)
    for i in range(layer.n_slices):
        a, b = layer.lora_a_stacked[i][slot, 0, :rank], layer.lora_b_stacked[i][slot, 0, :, :rank]
        yield (int(by_input), layer.tp_rank * a.shape[1] if by_input else 0, a), (0, parts[i] * b.shape[0], b)
