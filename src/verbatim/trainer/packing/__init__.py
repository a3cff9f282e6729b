"""Packs training samples into micro-batches: decides which samples share a forward pass, and nothing else."""

from collections.abc import Callable, Sequence

from verbatim.config import import_object
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing.rows import pack_rows
from verbatim.trainer.packing.tree import pack_tree, unique_tokens

WORTH_A_TREE = 0.95
"""A tree of at most this share of the rows' tokens is the cheaper one."""


def pack_auto(samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool) -> list[MicroBatch]:
    """A tree where that saves tokens, what its cuts repeat included, and rows elsewhere."""
    tree, rows = (
        pack(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole) for pack in (pack_tree, pack_rows)
    )
    return tree if num_tokens(tree) <= WORTH_A_TREE * num_tokens(rows) else rows


def num_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens that are computed."""
    return sum(micro_batch.num_tokens for micro_batch in micro_batches)


Packer = Callable[..., list[MicroBatch]]
"""`packer(samples, *, micro_batch_tokens, keep_whole) -> list[MicroBatch]`."""

PACKERS: dict[str, Packer] = {"auto": pack_auto, "rows": pack_rows, "tree": pack_tree}
"""Packers by name; "auto" takes the cheapest one."""


def find_packer(name: str) -> Packer:
    """The packer of this name, or at this import path.

    Raises:
        ComponentError: it cannot be imported.
    """
    packer: Packer = PACKERS.get(name) or import_object(name)
    return packer


__all__ = ["PACKERS", "Packer", "find_packer", "num_tokens", "pack_auto", "pack_rows", "pack_tree", "unique_tokens"]
