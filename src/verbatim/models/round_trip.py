"""Checks that a sampler which loads saved weights has the same weights as the trainer that saved them."""

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
    """Save random weights of a small `transformers` model's shapes and load them into a copy, bit for bit.

    Raises:
        ModelError: a tensor comes back with other values, or not at all; the architecture is named.
    """
    architecture = type(model).__name__
    trained, updated = deepcopy(model), deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for tensor in trained.state_dict().values():
        if tensor.is_floating_point():  # distinct values: two biases of zeros could change places unseen
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    for tensor in updated.state_dict().values():
        tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.bitwise_not_()
    try:
        with tempfile.TemporaryDirectory() as folder, refusing("an error"):
            save_model(trained, None, Path(folder))
            load_weights(updated, Path(folder))
    except ModelError as error:
        raise ModelError(
            f"{architecture} cannot take new weights: what it saves does not load into it again: {error}"
        ) from error
    after = updated.state_dict()
    changed = [name for name, value in trained.state_dict().items() if not torch.equal(value, after[name])]
    if changed:
        raise ModelError(
            f"{architecture} cannot take new weights: {len(changed)} of its tensors come back from "
            f"a saved folder with other values, {changed[0]} first"
        )
