"""Splits the tokens of a micro-batch over ranks, for trajectories longer than one of them can hold (DeepSpeed Ulysses,
Jacobs et al. 2023, arXiv 2309.14509).

Each rank of a group computes a slice of the tokens. Attention alone mixes tokens, so before it an all-to-all turns all
heads of a slice into some heads of all tokens, and after it another one turns them back. In between the plan of the
whole micro-batch is used as it is: rows, trees, windows, soft caps and sinks know nothing of slices.
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
    """The ranks that hold slices of the same micro-batches, as one of them sees them: neighbours, `size` at a time.

    Legend: S ranks of the group, T tokens of a slice, U = S T tokens, h heads, d size of a head.

    Args:
        ranks: All of them, a multiple of `size`; each makes its group at the same time.
        size: Ranks of a group.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self.size = size
        self.rank = ranks.rank % size
        """This process in its group."""
        self._group, _ = dist.new_subgroups(  # type: ignore[no-untyped-call]
            size, timeout=timedelta(seconds=ranks.deadline)
        )

    @property
    def leads(self) -> bool:
        """Whether this process speaks for its group, where all of them know the same."""
        return self.rank == 0

    def slice(self, num_tokens: int) -> slice:
        """This rank's tokens, of a number that is a multiple of S."""
        each, rest = divmod(num_tokens, self.size)
        assert rest == 0, f"{num_tokens} tokens for {self.size} ranks"
        return slice(self.rank * each, (self.rank + 1) * each)

    def to_heads(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Turns tensors [1, h, T, d], all heads of this rank's tokens, into [1, h / S, U, d], some heads of all tokens.

        One exchange for all of them; its backward pass is an exchange too. Rank r has the heads from r h / S.
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
            whole.reshape(-1, *shape).transpose(0, 1).contiguous()[None].to(x_BhTd.dtype)  # a view would keep all
            for whole, shape, x_BhTd in zip(wholes, shapes, slices, strict=True)
        ]

    def to_tokens(self, heads_BUhd: Tensor) -> Tensor:
        """The way back: of some heads of all tokens, [1, U, h / S, d], all heads of this rank's, [1, T, h, d]."""
        _, num_tokens, heads, size = heads_BUhd.shape
        mine = heads_BUhd[0].reshape(self.size, num_tokens // self.size, heads * size)
        exchanged = self._exchange(mine).view(*mine.shape[:2], heads, size)
        out: Tensor = exchanged.transpose(0, 1).flatten(1, 2)[None]
        return out

    def total(self, values: Tensor) -> Tensor:
        """The sum over the group, in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def _exchange(self, x_STF: Tensor) -> Tensor:
        out: Tensor = _AllToAll.apply(x_STF, self._group)  # type: ignore[no-untyped-call]
        return out


class _AllToAll(torch.autograd.Function):
    """Rank r sends `x[s]` to rank s and gets what that one has for it as `out[s]`. Nothing is saved."""

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
    """The `AttentionPlan` of a slice: some heads of the whole micro-batch.

    Key/value heads are repeated where the group has more ranks than there are, or does not divide them; their gradients
    add up.

    Args:
        whole: The plan of the whole micro-batch.
        group: The ranks that have slices of it.
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
    """The group of this process; None: each process has micro-batches of its own. All ranks call it.

    Raises:
        UsageError: the processes are no multiple of `size`.
    """
    if size == 1:
        return None
    refuse_uneven_ranks(1 if ranks is None else ranks.size, size)
    assert ranks is not None
    return SequenceGroup(ranks, size)


def refuse_uneven_ranks(num_ranks: int, size: int) -> None:
    """Refuse groups that leave a process over.

    Raises:
        UsageError: such a size.
    """
    if num_ranks % size:
        processes = f"{num_ranks} processes" if num_ranks > 1 else "1 process"
        raise UsageError(
            f"trainer.parallel.sequence = {size} does not divide the {processes} of the trainer "
            "(trainer.parallel.processes, or what a launcher starts)"
        )


def refuse_slices(lm: CausalLM, size: int) -> None:
    """Refuse a model whose tokens cannot be split over so many ranks.

    Raises:
        ModelError: its rows are computed each by itself, or its heads are no multiple of `size`.
    """
    if lm.rows_alone:
        raise ModelError(
            f"{type(lm.model).__name__} is computed row by row, because more than attention mixes its tokens, "
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
