"""Routes attention through one interface: each forward pass has a plan that defines which tokens attend to which.

Models are loaded with `attn_implementation="verbatim"` and called with `attention_plan=plan`. `transformers`
then builds no mask of its own and each attention layer calls `plan.attend`. Packed rows, prefix trees and the
sampler's key/value cache are plans; the model code stays that of `transformers`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "verbatim"


class AttentionPlan(Protocol):
    """Legend: B batch, H query heads, K key/value heads, T tokens, D head size of queries and keys, E of values."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
        sliding_window: int | None,
    ) -> Tensor:  # fmt: skip
        """The attention output, [B, T, H, E].

        Args:
            layer_index: For plans that keep something of each layer.
            query_BHTD: [B, H, T, D].
            key_BKTD: [B, K, T, D].
            value_BKTD: [B, K, T, E].
            scale: Multiplies the scores.
            sliding_window: Tokens, or ancestors in a tree, that a query sees, itself included; None = all before it.
        """


class WholeSequencePlan:
    """One causal sequence, with a sliding window where a layer has one."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
        sliding_window: int | None,
    ) -> Tensor:  # fmt: skip
        """The attention output, [1, T, H, D]."""
        length = query_BHTD.shape[2]
        mask = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=query_BHTD.device)
            back = at[:, None] - at
            mask = (back >= 0) & (back < sliding_window)
        out = torch.nn.functional.scaled_dot_product_attention(
            query_BHTD, key_BKTD, value_BKTD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, *,
    attention_plan: AttentionPlan, **unsupported: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    for name in ("softcap", "s_aux"):
        if unsupported.get(name) is not None:
            raise NotImplementedError(f"attention with {name}, which plans do not have")
    assert dropout == 0.0, "attention dropout would make trainer and sampler two different policies"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer_index: int = module.layer_idx  # type: ignore[assignment]
    out = attention_plan.attend(layer_index, query, key, value, scale=scale, sliding_window=sliding_window)
    return out.contiguous(), None  # some models take a view of it


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
