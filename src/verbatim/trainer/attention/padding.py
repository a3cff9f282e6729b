"""Copies tokens into padded grids and back, with backward passes that are gathers and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Padding:
    """The places of a micro-batch's tokens in the padded grids of an attention plan.

    Legend: U tokens, P places in all grids together, H heads, D head size.

    Example: tokens 0, 1, 2 in two rows of two places: `token_of_place = [0, 0, 1, 2]`, `real = [T, F, T, T]`.
    """

    def __init__(self, token_of_place: Tensor, real: Tensor, device: torch.device | str) -> None:
        """Build the index maps from places to tokens and from tokens to places.

        Args:
            token_of_place: The index of the token that each place holds: int64 [P]. A place of padding may hold any
                token.
            real: True for a token's own place, false for padding: bool [P]. Each token has exactly one place of its
                own.
            device: Where the tokens are.
        """
        (places,) = real.nonzero(as_tuple=True)
        place_of_token = torch.empty_like(places)
        place_of_token[token_of_place[places]] = places
        self._token_of_place_P = token_of_place.to(device)
        self._place_of_token_U = place_of_token.to(device)
        self._as_is = torch.equal(token_of_place, torch.arange(len(place_of_token), device=places.device))

    def __len__(self) -> int:
        return len(self._place_of_token_U)

    def spread(self, x_UHD: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Copy a tensor [U, H, D] into one tensor [rows, columns, H, D] per grid. Padding holds copies of arbitrary
        tokens; the gradient of padding is ignored and must be 0."""
        x_PHD = x_UHD
        if not self._as_is:
            x_PHD = _Spread.apply(x_UHD, self._token_of_place_P, self._place_of_token_U)  # type: ignore[no-untyped-call]
        parts = torch.split_with_sizes(x_PHD, [rows * columns for rows, columns in shapes])
        return [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]

    def collect(self, x_PHD: Tensor) -> Tensor:
        """Copy a tensor [P, H, D] of places back to a tensor [U, H, D] of tokens, without the padding."""
        if self._as_is:
            return x_PHD
        out: Tensor = _Collect.apply(x_PHD, self._place_of_token_U)  # type: ignore[no-untyped-call]
        return out


# Autograd's own backward of a gather scatter-adds into zeros. Here no token has two places with a gradient, so the
# backward is a gather or a copy: faster, and deterministic on every device.


class _Spread(torch.autograd.Function):
    """Copies tokens to places. The gradient of padding is 0, so the backward pass ignores it."""

    @staticmethod
    def forward(ctx: Any, x_UHD: Tensor, token_of_place_P: Tensor, place_of_token_U: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_token_U)
        return x_UHD.index_select(0, token_of_place_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_of_token_U,) = ctx.saved_tensors
        return grads[0].index_select(0, place_of_token_U), None, None


class _Collect(torch.autograd.Function):
    """Copies places back to tokens. In the backward pass, padding gets a gradient of 0."""

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
