"""Routes attention through one interface: the plan of a forward pass defines which tokens attend to which.

Models are loaded with `attn_implementation="verbatim"` and called with `attention_plan=plan`. `transformers` then
builds no mask, and each attention layer calls `plan.attend`. There are plans for packed rows, for prefix trees and for
the sampler's KV cache; the model code itself is the code in `transformers`, unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "verbatim"
QUERIES = 128
"""Number of queries per block. The attention scores of one block are materialised at a time, which bounds their
memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """A layer's attention parameters. The plan, not this record, decides which keys each query sees."""

    scale: float
    """Factor by which the query-key products are multiplied to get the attention scores."""
    sliding_window: int | None = None
    """Sliding window: the number of tokens (in a tree, of ancestors) that a query sees, including itself; None means
    that there is no window."""
    softcap: float | None = None
    """Scores s become `softcap * tanh(s / softcap)` (Gemma 2); None means that there is no soft cap."""
    sinks_H: Tensor | None = None
    """Attention sinks (gpt-oss), [H]: a score per query head that enters the softmax but has no value; None if the
    model has no sinks."""

    @property
    def is_plain(self) -> bool:
        """True if the weights are the plain softmax of the scores, which fused kernels compute."""
        return self.softcap is None and self.sinks_H is None

    def capped(self, scores: Tensor) -> Tensor:
        """The scores after the soft cap."""
        return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap


class AttentionPlan(Protocol):
    """Computes attention for the layers of one forward pass.

    Legend: B batch, H query heads, K key/value heads, T tokens, D head size of queries and keys, E head size of values.
    """

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [B, T, H, E].

        Args:
            layer_index: The layer's index, for plans with state per layer such as a KV cache.
            query_BHTD: [B, H, T, D].
            key_BKTD: [B, K, T, D].
            value_BKTD: [B, K, T, E].
            call: The layer's attention parameters.
        """


class WholeSequencePlan:
    """A single causal sequence. Layers with a sliding window apply their window."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, T, H, E]."""
        length = query_BHTD.shape[2]
        window = length if call.sliding_window is None else call.sliding_window
        at = torch.arange(length, device=query_BHTD.device)
        if not call.is_plain:
            parts = [
                explicit_attention(query_BHTD[:, :, part], key_BKTD, value_BKTD, _sees(part, at, window), call)
                for part in torch.split_with_sizes(at, _sizes(length))
            ]
            return torch.cat(parts, dim=2).transpose(1, 2)
        mask = _sees(at, at, window) if window < length else None
        out = torch.nn.functional.scaled_dot_product_attention(
            query_BHTD, key_BKTD, value_BKTD, attn_mask=mask, is_causal=mask is None, scale=call.scale, enable_gqa=True
        )
        return out.transpose(1, 2)


def explicit_attention(
    query_BHQD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, sees_QT: Tensor, call: AttentionCall
) -> Tensor:
    """The output of attention with soft cap and sinks: [B, H, Q, E], in the dtype of the values. All scores are in
    memory at the same time.

    The softmax is computed in at least float32: `exp(s_t) / (exp(sink) + sum of exp(s_u) over the visible keys u)`.

    Args:
        query_BHQD: [B, H, Q, D]; H is a multiple of K, and the query heads of one key/value head are adjacent.
        key_BKTD: [B, K, T, D].
        value_BKTE: [B, K, T, E].
        sees_QT: bool [Q, T], True where a query sees a key; each query sees at least one key.
        call: The layer's attention parameters. Its window is ignored, because `sees_QT` already contains it.
    """
    groups = query_BHQD.shape[1] // key_BKTD.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key_BKTD, value_BKTE))
    scores = (query_BHQD * call.scale) @ keys.transpose(2, 3)
    scores = call.capped(scores.to(torch.promote_types(scores.dtype, torch.float32)))
    scores = scores.masked_fill(~sees_QT, -torch.inf)
    weights = scores.softmax(-1)
    if call.sinks_H is not None:
        # sigmoid(logsumexp - sink) = Z / (Z + exp(sink)): turns softmax weights without the sink into weights with it,
        # in a numerically stable way.
        sinks = call.sinks_H[:, None, None].to(scores.dtype)
        weights = weights * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks)
    return weights.to(values.dtype) @ values


def _sizes(length: int) -> list[int]:
    return [min(QUERIES, length - start) for start in range(0, length, QUERIES)]


def _sees(queries_Q: Tensor, keys_T: Tensor, window: int) -> Tensor:
    back = queries_Q[:, None] - keys_T
    return (back >= 0) & (back < window)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0.0, "attention dropout would make trainer and sampler two different policies"
    call = AttentionCall(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    layer_index: int = module.layer_idx  # type: ignore[assignment]
    out = attention_plan.attend(layer_index, query, key, value, call)
    return out.contiguous(), None  # some models call `view` on the result


def follow_plans(model: Any) -> None:
    """Make a model's attention follow the `AttentionPlan` that is passed to each forward pass."""
    register_attention()
    model.set_attn_implementation(ATTENTION)


def register_attention() -> None:
    """Register our attention with `transformers`. An existing entry is kept, because it may be the compiled version."""
    if ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
