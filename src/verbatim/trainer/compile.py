"""Compiles the decoder layers of a model by `torch.compile`, one by one; attention stays as it is."""

from __future__ import annotations

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

_MOST_VARIANTS = 64
"""Most compiled versions of a layer's code: with gradients and without, of each kind of layer, adapters on and off."""

_MARK = "_verbatim_between_pieces"


def compile_layers(model: Any) -> None:
    """Compile each decoder layer's `forward`, for any number of tokens.

    What recomputes activations, and what gathers and releases a sharded layer's parameters, stands around the compiled
    code. Attention follows a plan, which is another one for each micro-batch and, for trees on a CPU, numpy
    and loops: it is called between two compiled pieces. FlexAttention, on CUDA, is compiled by itself as always. The
    routers of a mixture of experts are called in the same way: passes watch them, or choose for them (`Routers`).
    """
    register_attention()
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _between_pieces(ALL_ATTENTION_FUNCTIONS[ATTENTION]))
    for router in router_modules(model):
        router.forward = _between_pieces(router.forward)
    compiled: Any = torch.compile  # its overloads know no recompile_limit
    for layer in decoder_layers(model):
        own = compiled(_own_forward(layer), dynamic=True, recompile_limit=_MOST_VARIANTS)
        layer.forward = partial(_forward, layer, own) if _recomputes_in_forward(layer) else own


def _recomputes_in_forward(layer: Any) -> bool:
    """Whether activation checkpointing is a part of the class's `forward`; it was one of `__call__` before."""
    return isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)


def _own_forward(layer: Any) -> Callable[..., Any]:
    """The layer's `forward` without activation checkpointing.

    `transformers` wraps that of each class, FSDP's subclasses too; these wrappers have one code object.
    """
    forward = type(layer).forward
    if _recomputes_in_forward(layer):
        wrapper = forward.__code__
        while forward.__code__ is wrapper:
            forward = forward.__wrapped__
    bound: Callable[..., Any] = forward.__get__(layer)
    return bound


def _forward(layer: Any, own: Callable[..., Any], *inputs: Any, **given: Any) -> Any:
    """As the class's `forward`, with `own` in it."""
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(partial(own, **given), *inputs)
    return own(*inputs, **given)


def _between_pieces(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called between two compiled pieces; one that is so already stays as it is, because attention
    is registered once for all models of a process."""
    if getattr(function, _MARK, False):
        return function
    called: Any = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    setattr(called, _MARK, True)
    return called  # type: ignore[no-any-return]


def choose_kernels(model: Any, *, compiled: bool, rounds: bool = False) -> None:
    """Compile the layers by torch; else take its operators, on a CPU the faster one of two libraries, and C of ours
    between the products. `rounds`: the products of its layers in bfloat16 (`round_products`)."""
    if compiled:
        compile_layers(model)
        return
    use_onednn(model)
    fuse_layers(model)
    narrow_last_layer(model)
    if rounds and can_round(model):
        round_products(model)


def rounds_products(model: Any, config: TrainerConfig, device: torch.device, *, sharded: bool) -> bool:
    """Whether `trainer.dtype = "bfloat16"` is products in bfloat16 alone; else it is autocast: on CUDA, of a model with
    other products than those of linear layers, and where torch compiles or shards the layers."""
    alone = config.dtype == "bfloat16" and device.type == "cpu" and not config.compile and not sharded
    return alone and can_round(model)


def try_compiled(targets: TargetLogprobs, sharding: Sharding | None) -> None:
    """Compute one token forward and backward: a layer that cannot be compiled is refused before the first batch. All
    ranks call it; gradients are empty afterwards.

    Raises:
        ModelError: a layer cannot be compiled, or there is no compiler; says why.
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
        sharding.drop_unused()  # what was used in this pass says nothing of the next optimizer step
