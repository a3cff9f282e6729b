"""Computes the last decoder layer only for tokens from which a target is predicted.

Keys and values are needed for all tokens. Queries, attention output, feed-forward layer and final norm are needed only
where a target is predicted. With prompts and tool results in the context, that is half of the tokens or fewer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

from verbatim.core.types import Int32
from verbatim.models.attention import AttentionCall
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.attention.native_tree import suits
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.linear import ROW_MULTIPLE

KNOWN = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Supported families: pre-norm residual layers (attention, then feed-forward), with nothing but a per-token norm after
the last layer."""
WORTH = 0.9
"""If more than this share of the tokens is wanted, all tokens are computed."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The tokens of a micro-batch from which targets are predicted. Legend: Q wanted tokens, M targets."""

    tokens: Int32
    """Indices into the micro-batch, ascending: int32 [Q]. The last index is repeated until Q is a multiple of
    `ROW_MULTIPLE`."""
    tokens_Q: Tensor
    """The indices of `tokens`, on the device: int64 [Q]."""
    places_M: Tensor
    """For each target, the index of its source in `tokens`: int64 [M]."""

    @staticmethod
    def among(num_tokens: int, sources: Int32, device: torch.device) -> Wanted | None:
        """The wanted tokens of a micro-batch; None if there are no wanted tokens, or so many that narrowing does not
        pay (`WORTH`).

        Example: 1,000 tokens with sources 7, 9, 9 and 300 give the tokens 7, 9 and 300 (62 times), and the places
        0, 1, 1, 2.
        """
        found, places = np.unique(sources, return_inverse=True)
        if not len(found) or len(found) + -len(found) % ROW_MULTIPLE > WORTH * num_tokens:
            return None
        tokens = np.append(found, np.repeat(found[-1:], -len(found) % ROW_MULTIPLE)).astype(np.int32)
        on_device = (torch.tensor(x, dtype=torch.int64, device=device) for x in (tokens, places))
        return Wanted(tokens, *on_device)


def family_of(module: nn.Module, kind: str) -> str | None:
    """The supported family of a module of this `kind`; None if its class belongs to no supported family. The module may
    be sharded."""
    # FSDP replaces a module's class by a subclass of its own; the first other class is the model's.
    own = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    return next((f for f in KNOWN if (own.__module__, own.__name__) == (_home(f), f"{f}{kind}")), None)


def _home(family: str) -> str:
    return f"transformers.models.{family.lower()}.modeling_{family.lower()}"


def narrow_last_layer(model: Any) -> None:
    """Make the last decoder layer of a supported model compute only the tokens in the attention plan's `wanted`, if
    `wanted` is set. The layer's output then has only these tokens."""
    layers = decoder_layers(model)
    family = family_of(layers[-1], "DecoderLayer") if layers else None
    if family is not None and family_of(model.base_model, "Model") == family and "forward" not in vars(layers[-1]):
        layer: Any = layers[-1]
        layer.forward = partial(_forward, layer, layer.forward, family)


def _forward(layer: Any, own: Callable[..., Tensor], family: str, hidden_1UD: Tensor, **given: Any) -> Tensor:
    """The layer's output for the wanted tokens, [1, Q, D]; if the plan names no wanted tokens, the output of
    `transformers`."""
    wanted: Wanted | None = getattr(given.get("attention_plan"), "wanted", None)
    if wanted is None:
        return own(hidden_1UD, **given)
    narrow: Callable[[Tensor], Tensor] = partial(_narrow, layer, family, wanted, given)
    if layer.gradient_checkpointing and layer.training and "__call__" not in vars(GradientCheckpointingLayer):
        # Some versions of `transformers` checkpoint in `forward`, not in `__call__`: there, this replaces `forward`.
        recomputed: Tensor = layer._gradient_checkpointing_func(narrow, hidden_1UD)
        return recomputed
    return narrow(hidden_1UD)


def _narrow(layer: Any, family: str, wanted: Wanted, given: Mapping[str, Any], hidden_1UD: Tensor) -> Tensor:
    """The layer's output for the wanted tokens."""
    attended_1QI = _attention(layer.self_attn, family, layer.input_layernorm(hidden_1UD), wanted, **given)
    hidden_1QD = hidden_1UD.index_select(1, wanted.tokens_Q) + layer.self_attn.o_proj(attended_1QI)
    out: Tensor = hidden_1QD + layer.mlp(layer.post_attention_layernorm(hidden_1QD))
    return out


def _attention(
    attention: Any,
    family: str,
    x_1UD: Tensor,
    wanted: Wanted,
    *,
    attention_plan: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """The attention output of all heads for the wanted tokens, [1, Q, H * E], before the output projection."""

    def heads(projection: nn.Module, norm: str | None, x: Tensor) -> Tensor:
        by_head: Tensor = projection(x).view(*x.shape[:2], -1, attention.head_dim)
        return (by_head if norm is None else getattr(attention, norm)(by_head)).transpose(1, 2)

    window = attention.config.sliding_window if family == "Mistral" else getattr(attention, "sliding_window", None)
    call = AttentionCall(scale=attention.scaling, sliding_window=window)
    rotate = sys.modules[_home(family)].apply_rotary_pos_emb
    norms = ("q_norm", "k_norm") if family == "Qwen3" else (None, None)
    key, value = heads(attention.k_proj, norms[1], x_1UD), heads(attention.v_proj, None, x_1UD)
    count = attention.config.num_attention_heads
    narrow = isinstance(attention_plan, TreePlan) and suits(count, key, value, call)
    mine = x_1UD.index_select(1, wanted.tokens_Q) if narrow else x_1UD
    tables = [x.index_select(1, wanted.tokens_Q) if narrow else x for x in position_embeddings]
    query = heads(attention.q_proj, norms[0], mine)
    # `rotate` applies one table to queries and keys of the same length. Here the lengths differ, so each is rotated in
    # its own call, with empty keys.
    query, key = (rotate(x, x[:, :0], *at)[0] for x, at in ((query, tables), (key, position_embeddings)))
    if narrow:
        out: Tensor = attention_plan.attend_some(wanted.tokens, query, key, value, call)
    else:
        out = attention_plan.attend(attention.layer_idx, query, key, value, call).index_select(1, wanted.tokens_Q)
    return out.flatten(2)
