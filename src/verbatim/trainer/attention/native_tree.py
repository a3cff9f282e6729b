"""Calls the C functions for attention of prefix trees on a CPU (`tree.c`), if a compiler is available."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verbatim.core.types import Int32
from verbatim.models import native
from verbatim.models.attention import AttentionCall

SOURCE = native.CSource.read(Path(__file__).with_name("tree.c"))
SIZE_MULTIPLE = 16
"""Head sizes must be a multiple of this: the C functions work on whole vectors of 16 floats."""
ROUNDED_MULTIPLE = 32
"""Head sizes must be a multiple of this for products of rounded factors: a tile has 32 of them in a row."""
MOST_GROUPS = 96
"""Maximum number of query heads per key/value head: `ROWS` in tree.c."""
MOST_KEYS = 2**31 - 1
"""Maximum number of keys in all blocks together: tree.c counts keys in int32."""
PARTS = 4
"""Minimum number of partial sums for the gradients of keys and values, divided among the threads. With up to this many
threads, the result does not depend on the number of threads."""
NO_WINDOW = 2**31 - 1
"""The window passed to C to mean "no window": larger than any micro-batch."""


def suits(num_heads: int, key_BKTD: Tensor, value_BKTE: Tensor, call: AttentionCall) -> bool:
    """True if the C functions exist and can compute attention with these keys, values and number of query heads."""
    sizes = (key_BKTD.shape[3], value_BKTE.shape[3])
    rounds = key_BKTD.dtype in (torch.float32, torch.bfloat16, torch.float16)
    on_cpu = type(key_BKTD) is Tensor and key_BKTD.device.type == "cpu"  # excludes FakeTensor, which has no data
    fits = rounds and call.is_plain and not any(size % SIZE_MULTIPLE for size in sizes)
    fits = fits and num_heads <= MOST_GROUPS * value_BKTE.shape[1]
    return on_cpu and fits and native.library(SOURCE) is not None


def has_tiles() -> bool:
    """True if the C functions can multiply bfloat16 with the processor's matrix tiles (AMX)."""
    library = native.library(SOURCE)
    return library is not None and bool(library.rounds())


class NativeForest:
    """A forest prepared for the C functions: the keys of each block of queries, for one window.

    Example: a path of 3 tokens with branches of 2 and of 1 tokens, in blocks of 3 queries: the keys of the second block
    are all six tokens. If only the first, second, fourth and last token have queries, the first block sees the first
    four tokens, and the second block sees the path and the last token.

    Args:
        depths: Depth of each token, in depth-first order: int32 [U].
        ends: End of each token's subtree: int32 [U].
        window: Number of tokens that a query sees, itself included; None if it sees all its ancestors.
        groups: Query heads per key/value head.
        queries: The tokens that have queries, ascending: int32 [Q]; None if all tokens have queries.
    """

    def __init__(
        self, depths: Int32, ends: Int32, window: int | None, groups: int, queries: Int32 | None = None
    ) -> None:
        library = native.library(SOURCE)
        assert library is not None
        self._depths, self._ends = (np.ascontiguousarray(x, dtype=np.int32) for x in (depths, ends))
        self._window = NO_WINDOW if window is None else window
        self._groups = groups
        self._queries = np.arange(len(depths), dtype=np.int32) if queries is None else queries
        self.queries_per_block = max(1, int(library.rows_per_block()) // groups)
        assert groups <= library.rows_per_block(), f"{groups} query heads per key/value head"
        keys = [*keys_of_blocks(self._depths, self._queries, self.queries_per_block, window)]
        self._keys = np.concatenate(keys)
        assert len(self._keys) <= MOST_KEYS, f"{len(self._keys)} keys of {len(keys)} blocks exceed int32"
        self._begins = np.cumsum([0, *map(len, keys)], dtype=np.int32)
        self.num_blocks = len(keys)
        arrays = (self._keys, self._begins, self._ends, self._depths, self._queries)
        self.tree = _Tree(*(array.ctypes.data for array in arrays))

    def attend(
        self, query_QHD: Tensor, key_UKD: Tensor, value_UKE: Tensor, scale: float, *, rounds: bool = False
    ) -> Tensor:
        """The attention output, [Q, H, E], in the dtype of the values; it is computed in float32.

        Args:
            query_QHD: Queries, [Q, H, D].
            key_UKD: Keys, [U, K, D].
            value_UKE: Values, [U, K, E].
            scale: Factor of the scores.
            rounds: Round the factors of all products to bfloat16, forward and backward, if this processor has matrix
                tiles for them (AMX) and the sizes fit; sums stay float32.
        """
        exact = [x.float() for x in (query_QHD, key_UKD, value_UKE)]
        rounds = rounds and has_tiles() and not any(x.shape[2] % ROUNDED_MULTIPLE for x in exact)
        out_QHE: Tensor = _NativeTreeAttention.apply(*exact, scale, self, rounds)  # type: ignore[no-untyped-call]
        return out_QHE.to(value_UKE.dtype)

    def shape(self, query_QHD: Tensor, key_UKD: Tensor, value_UKE: Tensor, scale: float) -> _Shape:
        """Sizes and strides of these tensors for the C functions."""
        sizes, planned = (len(query_QHD), len(key_UKD)), (len(self._queries), len(self._depths))
        assert sizes == planned, f"(queries, tokens) are {sizes}, the plan has {planned}"
        groups = query_QHD.shape[1] // key_UKD.shape[1]
        assert groups == self._groups, f"{groups} query heads per key/value head, the plan has {self._groups}"
        return _Shape(
            *sizes,
            query_QHD.shape[1],
            *key_UKD.shape[1:],
            value_UKE.shape[2],
            *query_QHD.stride()[:2],
            *key_UKD.stride()[:2],
            *value_UKE.stride()[:2],
            scale,
            self._window,
        )


def keys_of_blocks(depths: Int32, queries: Int32, queries_per_block: int, window: int | None) -> list[Int32]:
    """The keys of each block of neighbouring queries: the path to the block's first query, as far as the window
    reaches, then all tokens from the first query to the last query. Because of the depth-first order, these include
    every ancestor of a query.

    Example: a path of 3 tokens with branches of 2 and of 1 tokens, in blocks of 3: `[0, 1, 2]` and all six tokens.
    """
    found = []
    path = np.zeros(int(depths.max()) + 1, dtype=np.int32)
    done = 0
    for start in range(0, len(queries), queries_per_block):
        block = queries[start : start + queries_per_block]
        before, own = (np.arange(*x, dtype=np.int32) for x in ((done, block[0]), (block[0], block[-1] + 1)))
        # numpy keeps the last of several writes to a place: the latest token of each depth, so the path to `own`.
        path[depths[before]] = before
        own_depths = depths[own]
        first = 0 if window is None else max(0, int(own_depths.min()) - window + 1)
        found.append(np.concatenate([path[first : own_depths[0]], own]))
        path[own_depths] = own
        done = int(block[-1]) + 1
    return found


class _NativeTreeAttention(torch.autograd.Function):
    """Softmax attention. Saves only the inputs, the output and the log-sum-exp of each token and query head; scores are
    recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query_QHD: Tensor,
        key_UKD: Tensor,
        value_UKE: Tensor,
        scale: float,
        forest: NativeForest,
        rounds: bool,
    ) -> Tensor:
        query_QHD, key_UKD, value_UKE = map(_last_dense, (query_QHD, key_UKD, value_UKE))
        out_QHE = query_QHD.new_empty(*query_QHD.shape[:2], value_UKE.shape[2])
        lse_QH = query_QHD.new_empty(query_QHD.shape[:2])
        kind = "_rounded" if rounds else ""
        _call("forward" + kind, forest, (query_QHD, key_UKD, value_UKE), scale, (), (out_QHE, lse_QH))
        ctx.save_for_backward(query_QHD, key_UKD, value_UKE, out_QHE, lse_QH)
        ctx.scale, ctx.forest, ctx.kind = scale, forest, kind
        return out_QHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_QHD, key_UKD, value_UKE, out_QHE, lse_QH = ctx.saved_tensors
        tokens, heads = key_UKD.shape[:2]
        parts = -(-max(PARTS, torch.get_num_threads()) // heads)  # heads are independent: parts times heads of work
        grad_query_QHD = torch.empty_like(query_QHD, memory_format=torch.contiguous_format)
        grad_key, grad_value = (x.new_zeros(parts, tokens, heads, x.shape[2]) for x in (key_UKD, value_UKE))
        given = (query_QHD, key_UKD, value_UKE)
        results = (out_QHE, lse_QH, grads[0].contiguous(), grad_query_QHD, grad_key, grad_value)
        _call("backward" + ctx.kind, ctx.forest, given, ctx.scale, (parts,), results)
        return grad_query_QHD, grad_key.sum(0), grad_value.sum(0), None, None, None


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(
    name: str,
    forest: NativeForest,
    given: tuple[Tensor, Tensor, Tensor],
    scale: float,
    numbers: Sequence[int],
    tensors: Sequence[Tensor],
) -> None:
    """Call a C function.

    Raises:
        MemoryError: the C function could not allocate its buffers.
    """
    shape = forest.shape(*given, scale)
    sizes = (ctypes.c_int64(number) for number in (forest.num_blocks, forest.queries_per_block, *numbers))
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, *tensors))
    if getattr(native.library(SOURCE), name)(ctypes.byref(shape), ctypes.byref(forest.tree), *sizes, *pointers):
        raise MemoryError("attention of prefix trees: could not allocate memory for its blocks")


class _Shape(ctypes.Structure):
    """`Shape` in tree.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "queries",
                "tokens",
                "heads",
                "kv_heads",
                "key_size",
                "value_size",
                "query_place",
                "query_head",
                "key_token",
                "key_head",
                "value_token",
                "value_head",
            )
        ),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


class _Tree(ctypes.Structure):
    """`Tree` in tree.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "begins", "ends", "depths", "tokens"))
