"""Logprobs of a given sequence in one forward pass, past any cache."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.models.head import CausalLM

_LOGITS_CHUNK = 1024
"""Positions whose vocabulary-sized logits exist at one time."""


class WholeSequencePlan:
    """One causal sequence, with a sliding window where a layer has one."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
        sliding_window: int | None,
    ) -> Tensor:  # fmt: skip
        """The attention output, [1, T, H, D]."""
        length = query_BHTD.shape[2]
        mask = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=query_BHTD.device)
            back = at[:, None] - at
            mask = (back >= 0) & (back < sliding_window)
        out = torch.nn.functional.scaled_dot_product_attention(
            query_BHTD, key_BKTD, value_BKTD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)


@torch.inference_mode()
def sequence_logprobs(model: CausalLM, token_ids_L: Tensor, temperature: float) -> Tensor:
    """log p(token_t | tokens before t) at a temperature > 0: float32 [L]; the first is NaN, nothing predicts it.

    Args:
        token_ids_L: int64 [L], on the model's device.
    """
    length = len(token_ids_L)
    positions = torch.arange(length, device=token_ids_L.device)
    hidden = model.hidden(token_ids_L, positions, WholeSequencePlan())
    out = torch.full((length,), torch.nan, device=token_ids_L.device)
    for start in range(0, length - 1, _LOGITS_CHUNK):
        stop = min(start + _LOGITS_CHUNK, length - 1)
        logits = model.logits(hidden[start:stop]).float() / temperature
        targets = token_ids_L[start + 1 : stop + 1, None]
        out[start + 1 : stop + 1] = logits.log_softmax(-1).gather(-1, targets)[:, 0]
    return out
