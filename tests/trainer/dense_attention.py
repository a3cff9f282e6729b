"""Attention from its definition, with one mask over all tokens."""

import torch

from verbatim.models.attention import AttentionCall

SCALE = 0.3
SINKS = (-1.0, 0.5, 2.0, 4.0)
"""One for each of four query heads."""
KINDS = {"plain": {}, "softcap": {"softcap": 0.7}, "sinks": {"sinks": True}, "both": {"softcap": 0.7, "sinks": True}}


def attention_call(kind, window, *, dtype=torch.float64):
    """A call of one of `KINDS`, with four query heads; its sinks ask for a gradient."""
    sinks = torch.tensor(SINKS, dtype=dtype, requires_grad=True) if "sinks" in KINDS[kind] else None
    return AttentionCall(scale=SCALE, sliding_window=window, softcap=KINDS[kind].get("softcap"), sinks_H=sinks)


def dense(query, key, value, seen, call):
    """[1, H, U, D] to [1, U, H, E]. A sink is one more key, seen by every query, whose value is 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks_H is None:
        weights = scores.softmax(-1)
    else:
        sinks = call.sinks_H.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2)
