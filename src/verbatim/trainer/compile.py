"""Chooses the kernels of a model's layers: `torch.compile` layer by layer, or oneDNN and C functions on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import ModelError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.models.attention import ATTENTION, register_attention
from verbatim.models.experts import router_modules
from verbatim.models.refusal import describe
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.bfloat16 import can_round, round_products
from verbatim.trainer.fused import fuse_layers
from verbatim.trainer.last_layer import narrow_last_layer
from verbatim.trainer.linear import use_onednn
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.parallel.sharding import Sharding
from verbatim.trainer.rounded_parts import round_parts

_MOST_VARIANTS = 64
"""The value of torch's `recompile_limit`: a layer's code is compiled once for each combination of gradients on or off,
kind of layer, and adapters on or off."""

_MARK = "_verbatim_between_pieces"
"""Attribute that marks a function already wrapped by `_between_pieces`."""


def compile_layers(model: Any) -> None:
    """Compile each decoder layer's `forward`, for any number of tokens.

    Activation checkpointing and FSDP's hooks, which gather and release a layer's parameters, stay outside the compiled
    code. Attention is a graph break, called between two compiled pieces: its plan changes with every micro-batch, and
    for trees on a CPU it runs numpy and loops. FlexAttention on CUDA is compiled separately. The routers of a mixture
    of experts are graph breaks too, because a pass may observe the routers or replay recorded choices (`Routers`).
    """
    register_attention()  # this comes first: the next line wraps what this line registers
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _between_pieces(ALL_ATTENTION_FUNCTIONS[ATTENTION]))
    for router in router_modules(model):
        router.forward = _between_pieces(router.forward)
    for layer in decoder_layers(model):
        own = _compiled(_own_forward(layer))
        layer.forward = partial(_forward, layer, own) if _recomputes_in_forward(layer) else own


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any number of tokens, in up to `_MOST_VARIANTS` versions. In torch 2.11 and 2.12, the
    limit can be set only for the whole process."""
    compiled: Any = torch.compile
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return compiled(function, dynamic=True, recompile_limit=_MOST_VARIANTS)  # type: ignore[no-any-return]
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
    return compiled(function, dynamic=True)  # type: ignore[no-any-return]


def _recomputes_in_forward(layer: Any) -> bool:
    """True if this version of `transformers` applies activation checkpointing in the layer class's `forward`; older
    versions do so in `__call__`."""
    return isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)


def _own_forward(layer: Any) -> Callable[..., Any]:
    """The layer's `forward` without activation checkpointing.

    `transformers` wraps `forward` for every class, including FSDP's subclasses, so there may be several wrappers. The
    wrappers share one code object, by which they are recognised.
    """
    forward = type(layer).forward
    if _recomputes_in_forward(layer):
        wrapper = forward.__code__
        while forward.__code__ is wrapper:
            forward = forward.__wrapped__
    bound: Callable[..., Any] = forward.__get__(layer)
    return bound


def _forward(layer: Any, own: Callable[..., Any], *inputs: Any, **given: Any) -> Any:
    """Run the compiled `own` inside the class's `forward`, which applies activation checkpointing."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(own, **given), *inputs)
    return own(*inputs, **given)


def _between_pieces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as a graph break. A function that is already wrapped is returned unchanged: attention is
    registered once per process, so a second model finds it wrapped."""
    if getattr(function, _MARK, False):
        return function
    called: Any = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    setattr(called, _MARK, True)
    return called  # type: ignore[no-any-return]


def choose_kernels(model: Any, *, compiled: bool, rounds: bool = False) -> None:
    """Choose how a model's layers are computed.

    Args:
        model: A `transformers` model.
        compiled: Compile the layers by `torch.compile`. Otherwise, on a CPU, linear layers call oneDNN where it is
            faster, and C functions compute the operations between the matrix products.
        rounds: Compute the layers' products in bfloat16 (`round_products`), where `can_round` allows it.
    """
    if compiled:
        compile_layers(model)
        return
    use_onednn(model)
    fuse_layers(model)
    narrow_last_layer(model)
    if rounds and can_round(model):
        round_products(model)
        round_parts(model)


def rounds_products(model: Any, config: TrainerConfig, device: torch.device, *, sharded: bool) -> bool:
    """True if `trainer.dtype = "bfloat16"` rounds matrix products only (`bfloat16.py`). Otherwise this dtype means
    autocast: on CUDA, for models with products outside linear layers, and if the layers are compiled or sharded."""
    alone = config.dtype == "bfloat16" and device.type == "cpu" and not config.compile and not sharded
    return alone and can_round(model)


def try_compiled(targets: TargetLogprobs, sharding: Sharding | None) -> None:
    """Run one token forward and backward, so that a layer that cannot be compiled fails here, not at the first batch.
    All ranks call this; gradients are empty afterwards.

    Raises:
        ModelError: a layer cannot be compiled, or there is no compiler; the message gives the reason.
    """
    model = targets.model.model
    try:
        with torch.enable_grad():
            targets.idle_pass()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be compiled here ({describe(error)}); set trainer.compile = false"
        ) from error
    model.zero_grad(set_to_none=True)
    if sharding is not None:
        # Clears the sharding's record of used parameters: this pass is not part of an optimizer step.
        sharding.drop_unused()
