"""Sequence parallelism: splits a micro-batch's tokens over ranks, for trajectories that do not fit one rank (DeepSpeed
Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

Each rank of a group computes a slice of the tokens. Only attention mixes tokens. So before attention, an all-to-all
turns all heads of a slice into some heads of all tokens, and after attention, a second all-to-all reverses this
exchange. In between, the attention plan of the whole micro-batch is used unchanged: rows, trees, windows, soft caps and
sinks need no support for slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.core.errors import ModelError, UsageError
from verbatim.models.attention import AttentionCall, AttentionPlan
from verbatim.models.head import CausalLM
from verbatim.trainer.parallel.ranks import Ranks


class SequenceGroup:
    """The neighbouring ranks that hold slices of the same micro-batches, seen from one of them.

    Legend: S ranks in the group, T tokens in a slice, U = S T tokens, h heads, d head size.

    Args:
        ranks: All ranks, a multiple of `size`. Construction is collective over all of them.
        size: Number of ranks in a group.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self.size = size
        self.rank = ranks.rank % size
        """This process's rank within its group."""
        self._group, _ = dist.new_subgroups(  # type: ignore[no-untyped-call]
            size, timeout=timedelta(seconds=ranks.deadline)
        )

    @property
    def leads(self) -> bool:
        """True on the one rank of the group that reports the results. All ranks of the group have the results."""
        return self.rank == 0

    def slice(self, num_tokens: int) -> slice:
        """This rank's slice of `num_tokens` tokens, which must be a multiple of S."""
        each, rest = divmod(num_tokens, self.size)
        assert rest == 0, f"{num_tokens} tokens are not a multiple of {self.size} ranks"
        return slice(self.rank * each, (self.rank + 1) * each)

    def to_heads(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Turn all heads of this rank's tokens, [1, h, T, d], into some heads of all tokens, [1, h / S, U, d].

        All tensors are sent in one all-to-all; its backward pass is an all-to-all too. Rank r gets h / S heads,
        starting at head r h / S. The tensors may differ in h and d.
        """
        dtype = slices[0].dtype
        for x_BhTd in slices[1:]:
            dtype = torch.promote_types(dtype, x_BhTd.dtype)
        shapes = [(x_BhTd.shape[1] // self.size, x_BhTd.shape[3]) for x_BhTd in slices]
        parts = [
            x_BhTd[0].reshape(self.size, heads, -1, size).transpose(1, 2).flatten(2).to(dtype)
            for x_BhTd, (heads, size) in zip(slices, shapes, strict=True)
        ]  # [S, T, h / S * d]
        exchanged = self._exchange(torch.cat(parts, dim=2)).flatten(0, 1)
        wholes = torch.split_with_sizes(exchanged, [heads * size for heads, size in shapes], dim=1)
        return [
            whole.reshape(-1, *shape).transpose(0, 1).contiguous()[None].to(x_BhTd.dtype)  # a view would keep all alive
            for whole, shape, x_BhTd in zip(wholes, shapes, slices, strict=True)
        ]

    def to_tokens(self, heads_BUhd: Tensor) -> Tensor:
        """The inverse of `to_heads`, for attention outputs: turn some heads of all tokens, [1, U, h / S, d], into all
        heads of this rank's tokens, [1, T, h, d]."""
        _, num_tokens, heads, size = heads_BUhd.shape
        mine = heads_BUhd[0].reshape(self.size, num_tokens // self.size, heads * size)
        exchanged = self._exchange(mine).view(*mine.shape[:2], heads, size)
        out: Tensor = exchanged.transpose(0, 1).flatten(1, 2)[None]
        return out

    def total(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks of the group, in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def _exchange(self, x_STF: Tensor) -> Tensor:
        out: Tensor = _AllToAll.apply(x_STF, self._group)  # type: ignore[no-untyped-call]
        return out


class _AllToAll(torch.autograd.Function):
    """All-to-all: sends `x[s]` to rank s and receives `out[s]` from it. The backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x_STF: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(x_STF, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(x_STF: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x_STF, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x_STF.contiguous(), group=group)
    return out


class SequencePlan:
    """The `AttentionPlan` of a slice: this rank computes attention for some heads of the whole micro-batch.

    If the number of ranks does not divide the number of key/value heads, key/value heads are repeated, and the
    gradients of the copies add up.

    Args:
        whole: The attention plan of the whole micro-batch.
        group: The ranks that hold slices of the micro-batch.
    """

    def __init__(self, whole: AttentionPlan, group: SequenceGroup) -> None:
        self.whole, self._group = whole, group

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, T, H, E]. Inputs: [1, H, T, D], [1, K, T, D], [1, K, T, E]; see `AttentionPlan`."""
        size, num_heads = self._group.size, query_BHTD.shape[1]
        _refuse_uneven_heads(num_heads, size)
        times = lcm(key_BKTD.shape[1], size) // key_BKTD.shape[1]
        if times > 1:
            key_BKTD, value_BKTD = (x.repeat_interleave(times, dim=1) for x in (key_BKTD, value_BKTD))
        if call.sinks_H is not None:
            call = replace(call, sinks_H=call.sinks_H[self._group.slice(num_heads)])
        query, key, value = self._group.to_heads([query_BHTD, key_BKTD, value_BKTD])
        return self._group.to_tokens(self.whole.attend(layer_index, query, key, value, call))


def sequence_group(ranks: Ranks | None, size: int) -> SequenceGroup | None:
    """The sequence-parallel group of this process; None if `size` is 1. All ranks call it.

    Raises:
        UsageError: the number of processes is not a multiple of `size`.
    """
    if size == 1:
        return None
    refuse_uneven_ranks(1 if ranks is None else ranks.size, size)
    assert ranks is not None
    return SequenceGroup(ranks, size)


def refuse_uneven_ranks(num_ranks: int, size: int) -> None:
    """Refuse a group size that does not divide the number of ranks.

    Raises:
        UsageError: the size does not divide the number of ranks.
    """
    if num_ranks % size:
        processes = f"{num_ranks} processes" if num_ranks > 1 else "1 process"
        raise UsageError(
            f"trainer.parallel.sequence = {size} does not divide the {processes} of the trainer "
            "(trainer.parallel.processes, or what a launcher starts)"
        )


def refuse_slices(lm: CausalLM, size: int) -> None:
    """Refuse a model whose tokens cannot be split over `size` ranks.

    Raises:
        ModelError: the model has to compute each row in a separate pass, or its number of heads is not a multiple of
            `size`.
    """
    if lm.rows_alone:
        raise ModelError(
            f"{type(lm.model).__name__} is computed row by row, because not only attention mixes its tokens, "
            "and a row cannot be split over processes; set trainer.parallel.sequence = 1"
        )
    _refuse_uneven_heads(getattr(lm.config, "num_attention_heads", size), size)


def _refuse_uneven_heads(num_heads: int, size: int) -> None:
    if num_heads % size:
        fit = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ModelError(
            f"trainer.parallel.sequence = {size} does not divide the {num_heads} attention heads of the "
            f"model; take one of {', '.join(map(str, fit))}"
        )
