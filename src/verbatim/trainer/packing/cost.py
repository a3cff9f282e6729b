"""Predicts the compute cost of a micro-batch from its tokens (linear layers), token pairs (attention) and targets
(head)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.types import MicroBatch

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs, in units of computing one token in all linear layers, forward and backward.

    In linear layers, attention and head alike, the backward pass costs twice the forward pass, so ratios of forward
    costs are enough.

    Example: with `CostModel(attention=((0, 0.5), (2, 0.25)), per_target=3.0)`, a row of 3 tokens with 1 target has 3
    tokens, 1 + 2 + 3 pairs in layers with full attention, and 1 + 2 + 2 pairs in layers with a window of 2. Its cost is
    `3 + 0.5 * 6 + 0.25 * 5 + 3 = 10.25`.
    """

    attention: tuple[tuple[int, float], ...] = ((0, 1 / 6144),)
    """(window, cost of a pair of tokens) for each kind of layer; window 0 means full causal attention. The default is
    for a dense model of width 1,024."""
    per_target: float = 0.0
    """Cost of the output head for one target."""
    unit: float = 0.0
    """Forward-pass FLOPs for which a cost of 1 stands: 2 for each parameter that a token uses in linear layers; 0 if
    unknown."""

    def runs(self, begins: Int64, ends: Int64, num_targets: Int64) -> Float64:
        """Costs of runs of tokens, each from position `begins` up to but not including `ends`, with `num_targets`
        targets: float64, same shape."""
        cost = (ends - begins) + self.per_target * num_targets
        for window, weight in self.attention:
            cost = cost + weight * (_pairs(ends, window) - _pairs(begins, window))
        return np.asarray(cost, dtype=np.float64)

    def micro_batch(self, micro_batch: MicroBatch) -> float:
        """Cost of a micro-batch of rows or trees. In both, a token at position p attends to p + 1 tokens."""
        seen = micro_batch.position_ids.astype(np.int64) + 1
        attention = sum(weight * float(np.minimum(seen, window or seen).sum()) for window, weight in self.attention)
        return micro_batch.num_tokens + attention + self.per_target * len(micro_batch.targets)


def _pairs(length: Int64, window: int) -> Int64:
    """Visible (query, key) pairs in a row of this length."""
    near = np.minimum(length, window) if window else length
    return near * (near + 1) // 2 + (length - near) * window


def model_cost(config: Any) -> CostModel:
    """The cost model of a decoder, from the text part of its `transformers` configuration.

    Forward FLOPs per layer: a token costs 2 P, where `P` is the number of linear-layer parameters that it uses (in a
    mixture of experts, only the parameters of its own experts). A pair of tokens costs 4 x heads x head width (queries
    by keys, weights by values). A target costs 2 x width x vocabulary once for the model. A missing number of key/value
    heads means as many as query heads; a missing feed-forward width means four times the model width.
    """

    def get(name: str, default: int) -> int:
        # A key may be missing or None.
        return int(getattr(config, name, None) or default)

    width, heads, layers = get("hidden_size", 1), get("num_attention_heads", 1), get("num_hidden_layers", 1)
    attended = heads * get("head_dim", width // heads)
    keys = get("num_key_value_heads", heads) * attended // heads
    experts = get("num_experts_per_tok", 0)
    inner = experts * get("moe_intermediate_size", get("intermediate_size", 4 * width))
    inner = inner or get("intermediate_size", 4 * width)
    linear = width * (2 * attended + 2 * keys + 3 * inner)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = get("sliding_window", 0)
    local = sum("sliding" in kind for kind in kinds) if window else 0
    pair = 2 * attended / (linear * len(kinds))
    parts = ((0, (len(kinds) - local) * pair), (window, local * pair))
    return CostModel(
        attention=tuple((reach, weight) for reach, weight in parts if weight),
        per_target=width * get("vocab_size", 0) / (linear * layers),
        unit=2.0 * linear * layers,
    )
