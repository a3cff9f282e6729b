"""Training samples to micro-batches: who shares a forward pass with whom, and nothing else."""

from collections.abc import Callable

from verbatim.packing.rows import pack_rows
from verbatim.types import MicroBatch

PACKERS: dict[str, Callable[..., list[MicroBatch]]] = {"auto": pack_rows, "rows": pack_rows}
"""`packer(samples, *, micro_batch_tokens, keep_whole) -> list[MicroBatch]`; "auto" takes the cheapest one."""

__all__ = ["PACKERS", "pack_rows"]
