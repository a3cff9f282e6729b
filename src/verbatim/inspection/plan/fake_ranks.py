"""Simulates the other processes of a trainer. This process is rank 0, and the only process that really exists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from verbatim.trainer.parallel.ranks import Ranks


class FakeRanks(Ranks):
    """`Ranks` whose collectives return this process's own values, as if all ranks had the same values."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.local_rank, self.deadline = 0, size, 0, 600.0
        self.device = torch.device("cpu")
        self.mesh = init_device_mesh("cpu", (size,))

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def agree(self, do: Callable[[], Any]) -> list[Any]:
        return [do()] * self.size

    def most(self, *numbers: int) -> list[int]:
        return list(numbers)

    def total(self, values: Tensor) -> Tensor:
        return values

    def anywhere(self, flags: Tensor) -> Tensor:
        return flags


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[FakeRanks | None]:
    """Act as rank 0 of `size` processes while the block runs. Yield the ranks, or None if `size` is 1."""
    if size == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield FakeRanks(size)
    finally:
        dist.destroy_process_group()
