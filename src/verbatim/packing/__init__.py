"""Training samples to micro-batches: who shares a forward pass with whom, and nothing else."""

from collections.abc import Callable, Sequence

from verbatim.packing.rows import pack_rows
from verbatim.packing.tree import pack_tree, unique_tokens
from verbatim.types import MicroBatch, TrainingSample

WORTH_A_TREE = 0.95
"""A tree of at most this share of the rows' tokens is the cheaper one."""


def pack_auto(samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool) -> list[MicroBatch]:
    """A tree where that saves tokens, rows elsewhere. Losses that see trajectories whole get rows."""
    total = sum(len(sample) for sample in samples if sample.num_trained_tokens)
    pack = pack_rows if keep_whole or unique_tokens(samples) > WORTH_A_TREE * total else pack_tree
    return pack(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)


PACKERS: dict[str, Callable[..., list[MicroBatch]]] = {"auto": pack_auto, "rows": pack_rows, "tree": pack_tree}
"""`packer(samples, *, micro_batch_tokens, keep_whole) -> list[MicroBatch]`; "auto" takes the cheapest one."""

__all__ = ["PACKERS", "pack_auto", "pack_rows", "pack_tree", "unique_tokens"]
