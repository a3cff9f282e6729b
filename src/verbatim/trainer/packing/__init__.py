"""Packs training samples into micro-batches. Packing decides only which samples share a forward pass."""

from collections.abc import Callable, Sequence

from verbatim.config import import_object
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing.rows import pack_rows
from verbatim.trainer.packing.tree import pack_tree, unique_tokens

WORTH_A_TREE = 0.95
"""Trees are used if they compute at most this share of the tokens that rows would compute."""


def pack_auto(samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool) -> list[MicroBatch]:
    """Pack samples as trees if this saves enough tokens (`WORTH_A_TREE`), otherwise as rows. Tokens that are repeated
    where a tree is cut count as well."""
    tree, rows = (
        pack(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole) for pack in (pack_tree, pack_rows)
    )
    return tree if num_tokens(tree) <= WORTH_A_TREE * num_tokens(rows) else rows


def num_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Total number of tokens that these micro-batches compute."""
    return sum(micro_batch.num_tokens for micro_batch in micro_batches)


Packer = Callable[..., list[MicroBatch]]
"""`packer(samples, *, micro_batch_tokens, keep_whole) -> list[MicroBatch]`."""

PACKERS: dict[str, Packer] = {"auto": pack_auto, "rows": pack_rows, "tree": pack_tree}
"""Packers by name; "auto" picks the cheaper of rows and trees."""


def find_packer(name: str) -> Packer:
    """The packer with this name or import path.

    Raises:
        ComponentError: the import path cannot be imported.
    """
    packer: Packer = PACKERS.get(name) or import_object(name)
    return packer


__all__ = ["PACKERS", "Packer", "find_packer", "num_tokens", "pack_auto", "pack_rows", "pack_tree", "unique_tokens"]
