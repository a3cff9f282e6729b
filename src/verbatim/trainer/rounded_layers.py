"""Rounds what each layer of a model gives to the next one to bfloat16, to see how far logprobs move by rounding alone.

An engine in bfloat16 keeps that sum of all layers so far in 8 bits. A trainer in bfloat16 rounds the factors of its
products, and keeps the sum in float32. How far they are from each other depends on the model: on its depth, and on how
sharp its logits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.models.tiny import decoder_layers


@contextmanager
def rounded_layers(model: Any) -> Iterator[None]:
    """A context in which the decoder layers of a model round what they return; None = as ever."""
    hooks = [] if model is None else [layer.register_forward_hook(_round) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round(layer: nn.Module, inputs: Any, output: Any) -> Any:
    """The output, a tensor or a tuple whose first element is one, with 8 bits for each number."""
    if isinstance(output, tuple):
        return (_rounded(output[0]), *output[1:])
    return _rounded(output)


def _rounded(hidden: Tensor) -> Tensor:
    return hidden.to(torch.bfloat16).to(hidden.dtype)
