"""Checks that a sampler that loads the trainer's saved weights gets exactly the trainer's weights."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from verbatim.core.errors import ModelError
from verbatim.models.loading import load_weights, save_model
from verbatim.models.refusal import refusing


@torch.no_grad()
def check_round_trip(model: Any) -> None:
    """Save random weights of a small `transformers` model, load them into a copy, and compare bit for bit.

    Raises:
        ModelError: a tensor is missing or has changed; the message names the architecture.
    """
    architecture = type(model).__name__
    trained, updated = deepcopy(model), deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for tensor in trained.state_dict().values():
        if tensor.is_floating_point():  # distinct values, because a swap of two all-zero biases would go unnoticed
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    for tensor in updated.state_dict().values():  # so that a tensor that is not loaded cannot match by chance
        tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.bitwise_not_()
    try:
        with tempfile.TemporaryDirectory() as folder, refusing("an error"):
            save_model(trained, None, Path(folder))
            load_weights(updated, Path(folder))
    except ModelError as error:
        raise ModelError(
            f"{architecture} cannot take new weights: the weights that it saves do not load again: {error}"
        ) from error
    after = updated.state_dict()
    changed = [name for name, value in trained.state_dict().items() if not torch.equal(value, after[name])]
    if changed:
        raise ModelError(
            f"{architecture} cannot take new weights: {len(changed)} of its tensors have other "
            f"values after they are saved and loaded, for example {changed[0]}"
        )
