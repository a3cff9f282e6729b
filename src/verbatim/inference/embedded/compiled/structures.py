"""The kernel's structures, field by field as in kernel.c, and the checks that a model fits them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.inference.embedded.fast_forward import FastBackbone, why_unknown
from verbatim.inference.embedded.kv_cache import up_to
from verbatim.models.attention import AttentionCall
from verbatim.models.head import CausalLM

_LINE = 64
"""Packed matrices begin at multiples of this many numbers, so at cache lines."""
UNIT = 16
"""Widths must be multiples of this number, because the kernel has no code for remainders."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerFields(ctypes.Structure):
    """One decoder layer: addresses of its weights, and its constants."""

    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "q",
                "k",
                "v",
                "o",
                "gate",
                "up",
                "down",
                "input_norm",
                "mlp_norm",
                "q_norm",
                "k_norm",
                "q_bias",
                "k_bias",
                "v_bias",
                "o_bias",
                "gate_bias",
                "up_bias",
                "down_bias",
            )
        ),
        ("window", _INT),
        *((name, _FLOAT) for name in ("input_eps", "mlp_eps", "q_eps", "k_eps", "scale", "unused")),
    )


class ModelFields(ctypes.Structure):
    """The model: its sizes, and addresses of its other weights."""

    _fields_ = (
        *((name, _INT) for name in ("layers", "width", "heads", "kv_heads", "head_size", "inner", "vocab", "halves")),
        *((name, _POINTER) for name in ("embedding", "head", "norm", "cos", "sin", "layer")),
        ("eps", _FLOAT),
        ("unused", _FLOAT),
    )


class PassFields(ctypes.Structure):
    """The rows of a pass, and the pages of their slots."""

    _fields_ = (
        ("rows", _INT),
        ("ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("tables", _POINTER),
        ("table_width", _INT),
        ("chunks", _POINTER),
        ("chunk_bits", _INT),
        ("outs", _INT),
        ("out_rows", _POINTER),
        ("out", _POINTER),
        ("threads", _INT),
        ("given", _POINTER),
    )


class DrawFields(ctypes.Structure):
    """Rows of hidden states from which the next tokens are sampled."""

    _fields_ = (
        ("model", _POINTER),
        ("rows", _INT),
        ("hidden", _POINTER),
        ("temperatures", _POINTER),
        ("uniforms", _POINTER),
        ("stride", _INT),
        ("logits", _POINTER),
        ("tokens", _POINTER),
        ("logprobs", _POINTER),
        ("threads", _INT),
        ("top_k", _POINTER),
        ("top_p", _POINTER),
        ("min_p", _POINTER),
        ("scratch", _POINTER),
        ("kept", _POINTER),
        ("num_kept", _POINTER),
        ("rounded", _POINTER),
    )


def why_not(model: CausalLM, fast: FastBackbone | None, calls: Sequence[AttentionCall]) -> str | None:
    """Why the kernel cannot compute a model; None if it can."""
    weight = model.output.weight
    if weight.device.type != "cpu":
        return f"the model is on {weight.device.type}"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the model is in {str(weight.dtype).removeprefix('torch.')}"
    if fast is None:
        return why_unknown(model)
    if not all(call.is_plain for call in calls):
        return "the attention has a soft cap or sinks"
    if model.softcap is not None or model.scale != 1.0 or model.output.bias is not None:
        return "the logits are not just the product of hidden states and output head"
    if len(model.backbone.embed_tokens.weight) < model.vocab_size:
        return "the output head has ids without an embedding"
    layer = fast.layers[0]
    sizes = {
        "the width": layer.mlp.gate_proj.weight.shape[1],
        "the inner width": layer.mlp.gate_proj.weight.shape[0],
        "the head size": fast.head_size,
    }
    for name, size in sizes.items():
        if size % UNIT:
            return f"{name} is {size}, not a multiple of {UNIT}"
    if fast.cos.shape[-1] != fast.head_size:
        return "the position encoding rotates only a part of each head"
    if not all(p.is_contiguous() and p.dtype == weight.dtype for p in model.model.parameters()):
        return "a weight is not contiguous, or in another number format than the output head"
    return None


class KernelModel:
    """The kernel's structure of a model, with matrices packed as the kernel reads them.

    Matrices are packed in the model's own number format, float32 or bfloat16; norms and biases are float32.

    Args:
        kernel: The kernel's functions.
        model: A model that `why_not` accepts.
        fast: The model's layers and position encoding.
        calls: Attention arguments of each layer.
    """

    def __init__(
        self, kernel: ctypes.CDLL, model: CausalLM, fast: FastBackbone, calls: Sequence[AttentionCall]
    ) -> None:
        half = fast.head_size // 2
        self.is_rounded = model.output.weight.dtype == torch.bfloat16
        """True if the matrices are in bfloat16."""
        self._kernel = kernel
        self._pack_matrix = kernel.verbatim_pack_halves if self.is_rounded else kernel.verbatim_pack
        # The kernel reads these by address, so they must live as long as this object.
        self._kept = [fast.cos[:, 0, :half].contiguous(), fast.sin[:, 0].contiguous(), model, fast]
        self._packed: list[tuple[Tensor, Tensor]] = []
        self._widened: list[tuple[Tensor, Tensor]] = []
        matrices = [
            model.output.weight,
            *(module.weight for layer in fast.layers for module in _linears(layer).values()),
        ]
        self._memory = zeros_in_large_pages(
            sum(up_to(kernel.verbatim_packed(*matrix.shape), _LINE) for matrix in matrices), model.output.weight.dtype
        )
        self._used = 0
        attention, mlp = fast.layers[0].attention, fast.layers[0].mlp
        self.layers = (LayerFields * len(fast.layers))()
        for fields, layer, call in zip(self.layers, fast.layers, calls, strict=True):
            self._fill_layer(fields, layer, call)
        self.fields = ModelFields(
            layers=len(fast.layers),
            width=int(model.output.weight.shape[1]),
            heads=attention.q_proj.weight.shape[0] // fast.head_size,
            kv_heads=attention.k_proj.weight.shape[0] // fast.head_size,
            head_size=fast.head_size,
            inner=int(mlp.gate_proj.weight.shape[0]),
            vocab=int(model.output.weight.shape[0]),
            halves=int(self.is_rounded),
            embedding=model.backbone.embed_tokens.weight.data_ptr(),
            head=self._pack(model.output.weight),
            norm=self._floats(model.backbone.norm.weight),
            cos=self._kept[0].data_ptr(),
            sin=self._kept[1].data_ptr(),
            layer=ctypes.addressof(self.layers),
            eps=model.backbone.norm.variance_epsilon,
        )
        self.address = ctypes.addressof(self.fields)
        """Address of `fields`, for the kernel."""
        self.num_weights = sum(p.numel() for p in model.backbone.layers.parameters())
        """Number of weights of all layers, each multiplied once per row; used to estimate the work of a pass."""
        self.refresh()

    def refresh(self) -> None:
        """Pack and convert the weights again after they were replaced in place."""
        for weight, packed in self._packed:
            self._pack_matrix(weight.data_ptr(), *weight.shape, packed.data_ptr())
        for weight, widened in self._widened:
            widened.copy_(weight)

    def layer_alone(self, index: int) -> ModelFields:
        """The model reduced to one of its layers, without the final norm."""
        alone = ModelFields.from_buffer_copy(self.fields)
        alone.layers, alone.layer, alone.norm = 1, ctypes.addressof(self.layers[index]), None
        return alone

    def _pack(self, weight: Tensor) -> int:
        """Allocate the packed form of a matrix, which `refresh` fills; returns its address."""
        count = self._kernel.verbatim_packed(*weight.shape)
        packed = self._memory[self._used : self._used + count]
        self._used += up_to(count, _LINE)
        self._packed.append((weight, packed))
        return packed.data_ptr()

    def _floats(self, weight: Tensor | None) -> int | None:
        """Address of a norm's weights or a bias in float32: the tensor's, or that of a copy, which `refresh` fills."""
        if weight is None or weight.dtype == torch.float32:
            return None if weight is None else weight.data_ptr()
        widened = torch.empty(weight.shape)
        self._widened.append((weight, widened))
        return widened.data_ptr()

    def _fill_layer(self, fields: LayerFields, layer: Any, call: AttentionCall) -> None:
        attention, floats = layer.attention, self._floats
        fields.input_norm, fields.mlp_norm = floats(layer.before_attention.weight), floats(layer.before_mlp.weight)
        fields.input_eps, fields.mlp_eps = layer.before_attention.variance_epsilon, layer.before_mlp.variance_epsilon
        for name, module in _linears(layer).items():
            setattr(fields, name, self._pack(module.weight))
            setattr(fields, f"{name}_bias", floats(module.bias))
        if hasattr(attention, "q_norm"):
            fields.q_norm, fields.k_norm = floats(attention.q_norm.weight), floats(attention.k_norm.weight)
            fields.q_eps, fields.k_eps = attention.q_norm.variance_epsilon, attention.k_norm.variance_epsilon
        fields.window, fields.scale = call.sliding_window or 0, call.scale


def _linears(layer: Any) -> dict[str, Any]:
    """The linear modules of a decoder layer, by their names in `LayerFields`."""
    attention, mlp = layer.attention, layer.mlp
    return {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }


def zeros_in_large_pages(count: int, dtype: torch.dtype) -> Tensor:
    """So many zeros, from a cache line's start, in large pages if the system has them: a pass reads all weights, keys
    and values once, and would look up the address of each 4 KB. numpy asks for large pages, torch does not."""
    room = np.zeros(count * dtype.itemsize + 64, dtype=np.uint8)
    return torch.from_numpy(room[-room.ctypes.data % 64 :][: count * dtype.itemsize]).view(dtype)
