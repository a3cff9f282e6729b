"""Computes common decoder layers with plain tensor operations, for model classes known to compute the same function.

In a small model, Python code around the layers takes longer than the layers themselves. This module computes

    h += o(attend(rope(norm(q(x))), rope(norm(k(x))), v(x)))   with x = rms_norm(h)
    h += down(silu(gate(x)) * up(x))                           with x = rms_norm(h)

from the model's own parameters and position encoding, for the classes in `_KNOWN`. This module is used only if its
results differ from the model's own by nothing but rounding (`disagreement`). Every other model runs its own `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.kv_cache import KeyValueShape
from verbatim.models import agreement
from verbatim.models.attention import AttentionCall, AttentionPlan, WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.products import onednn_is_faster, onednn_product

_KNOWN = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
_ROW_MULTIPLE = 16
"""Passes are padded to a multiple of this many rows, because oneDNN prepares a kernel for each number of rows, which
takes half a millisecond, and keeps only 1,024 kernels."""
_WORTH_A_CALL = 1 << 20
"""A matrix product with at least this many multiplications is faster with oneDNN than with MKL, although each call of
oneDNN has an overhead of 10 us."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """Modules and attention arguments of one decoder layer."""

    before_attention: nn.Module
    attention: Any
    before_mlp: nn.Module
    mlp: Any
    call: AttentionCall


class FastBackbone:
    """Computes `CausalLM.hidden` for one model, without the `forward` of its modules.

    Legend: T tokens of the pass, H query heads, K key/value heads, D head size, W width.

    Args:
        model: A model of a known class; `hidden` computes in float32.
        calls: Attention arguments of each layer.
        context_length: Maximum tokens of a sequence; positions are below it.
        fixed_rows: Every pass has the same number of rows, and the bits of a row must not depend on its index.
    """

    def __init__(
        self, model: CausalLM, calls: Sequence[AttentionCall], context_length: int, *, fixed_rows: bool = False
    ) -> None:
        backbone = model.backbone
        weight = model.output.weight
        is_float32 = weight.dtype == torch.float32 and weight.device.type == "cpu"
        self._uses_onednn = is_float32 and not fixed_rows and onednn_is_faster()
        self._embedding = backbone.embed_tokens
        self._norm = backbone.norm
        self.layers = [
            _Layer(
                before_attention=layer.input_layernorm,
                attention=layer.self_attn,
                before_mlp=layer.post_attention_layernorm,
                mlp=layer.mlp,
                call=call,
            )
            for layer, call in zip(backbone.layers, calls, strict=True)
        ]
        self.head_size = int(backbone.layers[0].self_attn.head_dim)
        positions = torch.arange(context_length, device=model.device)[None]
        cos, sin = backbone.rotary_emb(model.output.weight[:1].float(), positions)
        self.cos, self.sin = cos[0, :, None].clone(), sin[0, :, None, : self.head_size // 2].clone()

    def hidden(
        self, input_ids_T: Tensor, position_ids_T: Tensor, plan: AttentionPlan, rows_N: Tensor | None = None
    ) -> Tensor:
        """The last hidden states, after the final norm: [T, W], or [N, W] for only the rows `rows_N` (int64 [N])."""
        num_rows = len(input_ids_T if rows_N is None else rows_N)
        h = F.embedding(self._padded(input_ids_T), self._embedding.weight)
        cos, sin = self.cos[position_ids_T], self.sin[position_ids_T]
        last = len(self.layers) - 1
        # After the last layer only the rows in `rows_N` are needed, so the last MLP is not computed for other prompt
        # tokens.
        for index in range(last + 1):
            h = self._behind(index, h, cos, sin, plan, rows_N if index == last else None)
        return _normed(self._norm, h)[:num_rows]

    def layer(self, index: int, hidden_TW: Tensor, position_ids_T: Tensor, plan: AttentionPlan) -> Tensor:
        """The hidden states after one layer, computed from the hidden states before it: [T, W]."""
        cos, sin = self.cos[position_ids_T], self.sin[position_ids_T]
        return self._behind(index, self._padded(hidden_TW), cos, sin, plan, None)[: len(hidden_TW)]

    def _behind(
        self, index: int, h: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, rows_N: Tensor | None
    ) -> Tensor:
        """The hidden states after a layer, with padding; after the last layer, only the hidden states of the rows
        `rows_N`."""
        layer = self.layers[index]
        attended = self._attended(h, index, layer, cos, sin, plan)
        if rows_N is not None:
            rows_N = self._padded(rows_N)
            h, attended = h[rows_N], attended[rows_N]
        h = self._product(layer.attention.o_proj, self._padded(attended)).add_(h)
        x = _normed(layer.before_mlp, h)
        gated = F.silu(self._product(layer.mlp.gate_proj, x)).mul_(self._product(layer.mlp.up_proj, x))
        return self._product(layer.mlp.down_proj, gated).add_(h)

    def _padded(self, x: Tensor) -> Tensor:
        """Pad with rows of zeros to a multiple of `_ROW_MULTIPLE`, unless there are only a few rows."""
        padding = -len(x) % _ROW_MULTIPLE
        if not self._uses_onednn or not padding or len(x) < _ROW_MULTIPLE:
            return x
        return F.pad(x, (*(0, 0) * (x.ndim - 1), 0, padding))

    def _product(self, module: Any, x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        if self._uses_onednn and len(x) * weight.numel() >= _WORTH_A_CALL:
            return onednn_product(x, weight, bias)
        return F.linear(x, weight, bias)

    def _attended(self, h: Tensor, index: int, layer: _Layer, cos: Tensor, sin: Tensor, plan: AttentionPlan) -> Tensor:
        """The input of attention's output projection: [T, H * D], without padding."""
        attention, num_rows = layer.attention, len(cos)
        x = _normed(layer.before_attention, h)
        query, key, value = (
            self._product(module, x)[:num_rows].view(num_rows, -1, self.head_size)
            for module in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query, key = _normed(attention.q_norm, query), _normed(attention.k_norm, key)
        num_heads = query.shape[1]
        rotated = _rotated(torch.cat([query, key], dim=1), cos, sin)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        out = plan.attend(
            index, query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], layer.call
        )
        return out.reshape(num_rows, -1)


def known_backbone(
    model: CausalLM, calls: Sequence[AttentionCall], context_length: int, *, fixed_rows: bool = False
) -> FastBackbone | None:
    """The fast layers of a model of a known class, in any number format, or None for other models."""
    return FastBackbone(model, calls, context_length, fixed_rows=fixed_rows) if why_unknown(model) is None else None


def disagreement(fast: FastBackbone, model: CausalLM, context_length: int) -> str:
    """How the results differ from the model's results in float32; "" if they differ only by rounding."""
    length, plan = min(agreement.TOKENS, context_length), WholeSequencePlan()
    positions = torch.arange(length, device=model.device)
    return agreement.disagreement(
        model,
        lambda index, hidden: fast.layer(index, hidden, positions, plan),
        lambda ids: fast.hidden(ids, positions, plan),
        length=length,
    )


def why_unknown(model: CausalLM) -> str | None:
    """Why this module cannot compute the layers of a model; None if it can."""
    backbone = model.backbone
    kind = type(backbone)
    if kind.__name__ not in _KNOWN or not kind.__module__.startswith("transformers.models."):
        return f"{type(model.model).__name__} is not one of the architectures that it knows"
    if model.config.hidden_act != "silu":
        return f"the activation is {model.config.hidden_act}, not silu"
    # Computing from a module's parameters bypasses anything else that changes what the module computes.
    for name, module in backbone.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"the module {name or 'of the model'} has hooks, or a forward of its own"
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"the layer {name} is a {type(module).__name__}, not a plain Linear"
    return None


def _normed(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its angle: x * cos + rotate_half(x) * sin."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = x * cos
    out[..., :half].addcmul_(second, sin, value=-1)
    out[..., half:].addcmul_(first, sin)
    return out


def probe(model: CausalLM) -> tuple[KeyValueShape, list[AttentionCall]]:
    """Run a forward pass of one token to find the shape of keys and values, and the attention arguments of each layer.

    Raises:
        ModelError: layers differ in their key/value shapes, so one cache cannot hold them.
    """
    shapes: dict[int, tuple[int, int, int]] = {}
    calls: dict[int, AttentionCall] = {}

    class _Probe:
        def attend(
            self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
        ) -> Tensor:
            shapes[layer_index] = (key_BKTD.shape[1], key_BKTD.shape[-1], value_BKTD.shape[-1])
            calls[layer_index] = call
            heads = query_BHTD.shape[1]
            return value_BKTD.repeat_interleave(heads // value_BKTD.shape[1], dim=1).transpose(1, 2)

    with torch.inference_mode():
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        model.hidden(one, one, _Probe())
    if len(set(shapes.values())) != 1 or sorted(shapes) != list(range(len(shapes))):
        raise ModelError(
            f"{type(model.model).__name__} has layers with different key/value shapes {shapes}; the "
            "embedded sampler's cache needs the same (heads, key size, value size) in all"
        )
    kv_heads, key_size, value_size = shapes[0]
    shape = KeyValueShape(num_layers=len(shapes), num_kv_heads=kv_heads, key_size=key_size, value_size=value_size)
    return shape, [calls[layer] for layer in range(len(calls))]
