"""Attention of packed rows: each row by itself, rows of like length together, never a mask over the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BUCKET_FILL = 0.9
"""A row joins a bucket of longer rows where it is at least this share of their length."""


class RowsPlan:
    """The `AttentionPlan` of rows that lie one after the other: causal, inside each row only.

    Rows of like length are gathered into padded buckets. The padding is at the end of a row, where causality keeps
    it out of sight, so no mask is needed, and its gradient is 0. The index tensors are made once for all layers.

    Example: rows of lengths 3, 9 and 10 become the buckets `[2, 10]` (one place of padding) and `[1, 3]`.

    Legend: U tokens, P places of all buckets, B rows of a bucket, L its longest row, H query heads, K key/value
    heads, D head size.
    """

    def __init__(self, row_lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Plan for rows of these lengths, all above 0, laid one after the other."""
        tokens, places, self.shapes, num_places = [], [], [], 0
        for rows in _buckets(row_lengths):
            longest = rows[0][1]
            starts, lengths = torch.tensor(rows).T[:, :, None]
            within = torch.arange(longest)
            tokens.append((starts + torch.minimum(within, lengths - 1)).flatten())
            places.append((within < lengths).flatten().nonzero()[:, 0] + num_places)
            self.shapes.append((len(rows), longest))
            num_places += len(rows) * longest
        token_of_place, real = torch.cat(tokens), torch.cat(places)
        place_of_token = torch.empty_like(real)
        place_of_token[token_of_place[real]] = real
        self.token_of_place_P = token_of_place.to(device)
        """The token that each place shows; padding shows its row's last one: int64."""
        self.place_of_token_U = place_of_token.to(device)
        """Where each token is shown, padding aside: int64."""
        self.as_is = torch.equal(token_of_place, torch.arange(sum(row_lengths)))
        """Whether the buckets are the tokens as they lie."""

    def attend(
        self,
        layer_index: int,
        query_BHTD: Tensor,
        key_BKTD: Tensor,
        value_BKTD: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """The attention output, [1, U, H, D].

        Args:
            layer_index: Not used: all layers share the plan.
            query_BHTD: [1, H, U, D].
            key_BKTD: [1, K, U, D].
            value_BKTD: [1, K, U, D].
            scale: Multiplies the scores.
            sliding_window: Tokens a query sees, itself included; None = all before it.
        """
        assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == len(self.place_of_token_U)
        queries, keys, values = (self._split(x[0].transpose(0, 1)) for x in (query_BHTD, key_BKTD, value_BKTD))
        outs = [_causal(*qkv, scale, sliding_window) for qkv in zip(queries, keys, values, strict=True)]
        out_PHD = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])
        if not self.as_is:
            out_PHD = _Collect.apply(out_PHD, self.place_of_token_U)  # type: ignore[no-untyped-call]
        return out_PHD[None]

    def _split(self, x_UHD: Tensor) -> list[Tensor]:
        """[U, H, D] to one [B, H, L, D] per bucket."""
        x_PHD = x_UHD
        if not self.as_is:
            x_PHD = _Spread.apply(x_UHD, self.token_of_place_P, self.place_of_token_U)  # type: ignore[no-untyped-call]
        parts = torch.split_with_sizes(x_PHD, [rows * longest for rows, longest in self.shapes])
        return [
            part.view(*shape, *part.shape[1:]).transpose(1, 2) for part, shape in zip(parts, self.shapes, strict=True)
        ]


def _buckets(row_lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rows as (start, length), grouped by like length, longest first."""
    starts = [0]
    for length in row_lengths:
        assert length > 0
        starts.append(starts[-1] + length)
    rows = sorted(zip(starts[:-1], row_lengths, strict=True), key=lambda row: -row[1])
    buckets: list[list[tuple[int, int]]] = []
    for row in rows:
        if not buckets or row[1] < BUCKET_FILL * buckets[-1][0][1]:
            buckets.append([])
        buckets[-1].append(row)
    return buckets


def _causal(query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention, [B, H, L, D]; a sliding window is walked in blocks, so that cost is linear in L."""
    length = query_BHLD.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(
            query_BHLD, key_BKLD, value_BKLD, is_causal=True, scale=scale, enable_gqa=True
        )
    outs = []
    for start in range(0, length, window):
        end = min(start + window, length)
        first = max(0, start - window + 1)
        query = torch.arange(start, end, device=query_BHLD.device)[:, None]
        key = torch.arange(first, end, device=query_BHLD.device)[None]
        seen = (key <= query) & (key > query - window)
        outs.append(
            scaled_dot_product_attention(
                query_BHLD[:, :, start:end], key_BKLD[:, :, first:end], value_BKLD[:, :, first:end],
                attn_mask=seen, scale=scale, enable_gqa=True,
            )
        )  # fmt: skip
    return torch.cat(outs, dim=2)


# Autograd's own backward of a gather adds up into zeros, token by token. Here no token has two places with a
# gradient, so the backward is a gather or a copy: faster, and the same bits on every device.


class _Spread(torch.autograd.Function):
    """Tokens to places: the gradient of padding is 0 and is left out."""

    @staticmethod
    def forward(ctx: Any, x_UHD: Tensor, token_of_place_P: Tensor, place_of_token_U: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_token_U)
        return x_UHD.index_select(0, token_of_place_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_of_token_U,) = ctx.saved_tensors
        return grads[0].index_select(0, place_of_token_U), None, None


class _Collect(torch.autograd.Function):
    """Places to tokens: padding gets a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, x_PHD: Tensor, place_of_token_U: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_token_U)
        ctx.num_places = len(x_PHD)
        return x_PHD.index_select(0, place_of_token_U)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        (place_of_token_U,) = ctx.saved_tensors
        return grad.index_copy_(0, place_of_token_U, grads[0]), None
