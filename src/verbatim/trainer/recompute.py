"""Activation (gradient) checkpointing: recomputes layers in the backward pass to save memory."""

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
    """Make each layer recompute its activations in the backward pass, with dropout still off.

    Args:
        model: A `transformers` model.
        offload: Moves the layers' inputs, all that checkpointing keeps, to host memory; None to leave them on the
            device.
        routers: Routers of a mixture of experts, which must choose the same experts when a layer is recomputed; None
            for a dense model.

    Raises:
        ModelError: the model has no layers that support checkpointing, or it has dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers that can be checkpointed; set trainer.gradient_checkpointing = false"
        )
    if dropouts := _dropouts(layers):
        raise ModelError(
            f"{type(model).__name__} has {dropouts} in its layers: gradient checkpointing would apply this dropout, "
            "and the trained policy would differ from the one that sampled; set these to 0 in the model's config.json"
        )
    again: dict[str, Any] = {} if routers is None else {"context_fn": routers.recomputed}
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_checkpoint, offload, again)
        layer.gradient_checkpointing = True
        # transformers checkpoints only layers in training mode. The flag is set on the layer alone, so that the modules
        # inside it stay in eval mode (no dropout).
        layer.training = True


def _dropouts(layers: Iterable[nn.Module]) -> dict[str, float]:
    """Nonzero dropout probabilities in these layers, by module name. They are read from the modules, not from the
    configuration, which may also list dropouts that the layers do not have, such as the dropout of a classification
    head."""
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
    """Checkpoint a call, and offload the call's inputs. Only the inputs reach the offload's hooks: inside the call,
    `checkpoint` installs its own hooks, which save nothing."""
    with nullcontext() if offload is None else offload.hooks():
        return checkpoint(function, *inputs, use_reentrant=False, **again)
