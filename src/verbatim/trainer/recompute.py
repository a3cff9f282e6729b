"""Recomputes activations of layers in the backward pass, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from verbatim.core.errors import ModelError
from verbatim.models.experts import Routers
from verbatim.trainer.offload import ActivationOffload


def checkpoint_layers(model: Any, offload: ActivationOffload | None = None, routers: Routers | None = None) -> None:
    """Recompute each layer's activations in the backward pass, with dropout still off.

    Args:
        model: A model of `transformers`.
        offload: Keeps the inputs of the layers, all that is left to keep, off the device; None: they stay there.
        routers: Those of a mixture of experts, which are recomputed as they were.

    Raises:
        ModelError: a model without such layers, or with dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be checkpointed; set trainer.gradient_checkpointing = false"
        )
    if dropouts := _dropouts(layers):
        raise ModelError(
            f"{type(model).__name__} has {dropouts} in its layers: checkpointed layers would apply it, and train "
            "another policy than the one that sampled; set these to 0 in the model's config.json"
        )
    again: dict[str, Any] = {} if routers is None else {"context_fn": routers.recomputed}
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_checkpoint, offload, again)
        layer.gradient_checkpointing = True
        layer.training = True  # the layer alone, not the modules in it: transformers asks for it here


def _dropouts(layers: Iterable[nn.Module]) -> dict[str, float]:
    """What the modules of these layers would drop, by name. What a configuration names beside it, such as the dropout
    of a head for classification, is in none of them."""
    found: dict[str, float] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                is_one = "drop" in key.lower() or (key == "p" and "drop" in type(module).__name__.lower())
                if is_one and isinstance(value, int | float) and not isinstance(value, bool) and value:
                    found[f"{name}.{key}".removeprefix(".").removesuffix(".p")] = float(value)
    return found


def _checkpoint(
    offload: ActivationOffload | None, again: Mapping[str, Any], function: Callable[..., Any], *inputs: Any
) -> Any:
    """The hooks see the inputs alone: inside, `checkpoint` has hooks of its own, which keep nothing."""
    with nullcontext() if offload is None else offload.hooks():
        return checkpoint(function, *inputs, use_reentrant=False, **again)
