"""Computes the logprobs of a given sequence in one forward pass, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.core.types import KeptSets
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.kept_sets import DeviceKeptSets
from verbatim.models.positions import refuse_moving_positions

_LOGITS_CHUNK = 1024
"""Number of positions whose logits are computed at a time. This bounds memory."""


@torch.inference_mode()
def sequence_logprobs(
    model: CausalLM, token_ids_L: Tensor, temperature: float, kept_sets: KeptSets | None = None
) -> Tensor:
    """log p(token_t | tokens before t) at a temperature > 0: float32 [L]. The first is NaN: nothing predicts it.

    Args:
        model: The model.
        token_ids_L: int64 [L], on the model's device.
        temperature: Divides the logits; above 0.
        kept_sets: Kept sets of the L tokens. Each token is scored over its own kept set or, if this is None, over the
            vocabulary.

    Raises:
        ModelError: the sequence is so long that the positions of its first tokens would change.
    """
    length = len(token_ids_L)
    refuse_moving_positions(model, length)
    positions = torch.arange(length, device=token_ids_L.device)
    hidden = model.hidden(token_ids_L, positions, WholeSequencePlan())
    kept = None if kept_sets is None else DeviceKeptSets(kept_sets, token_ids_L.device)
    out = torch.full((length,), torch.nan, device=token_ids_L.device)
    for start in range(0, length - 1, _LOGITS_CHUNK):
        stop = min(start + _LOGITS_CHUNK, length - 1)
        logits = model.logits(hidden[start:stop]).float() / temperature
        if kept is not None:
            logits.masked_fill_(kept.outside(slice(start + 1, stop + 1), logits.shape[1]), -torch.inf)
        targets = token_ids_L[start + 1 : stop + 1, None]
        out[start + 1 : stop + 1] = logits.log_softmax(-1).gather(-1, targets)[:, 0]
    return out
