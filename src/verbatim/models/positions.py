"""Refuses sequences so long that a position encoding depends on the longest sequence of a forward pass.

The RoPE types `dynamic` and `longrope` change the angles of all positions as soon as one sequence of the pass is longer
than the original training length. A sample's logprobs would then depend on its neighbours in the pass, and a token's
logprob on later tokens. Up to the original training length these encodings behave like ordinary encodings.
"""

from __future__ import annotations

import torch

from verbatim.core.errors import ModelError
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.own_attention import TOLERANCE, probe_ids, tiny_pair
from verbatim.models.rope import fixed_length, rope_name
from verbatim.models.tiny import WINDOW


def refuse_moving_positions(model: CausalLM, length: int, *, setting: str = "orchestrator.seq_len") -> None:
    """Refuse sequences so long that they change the positions of shorter sequences.

    Args:
        model: The model. The accepted length is stored in it.
        length: The longest sequence, in tokens.
        setting: The configuration key to lower, for the message.

    Raises:
        ModelError: positions change at this length.
    """
    if length <= model.longest_checked:
        return
    limit = fixed_length(model.config)
    moves = limit is not None and length > limit
    if not moves and not model.rows_alone:
        moves = _moves(model, length)
    if moves:
        up_to = f" at {limit} tokens" if limit is not None else ""
        raise ModelError(
            f"the position encoding of {type(model.model).__name__}{rope_name(model.config)} changes{up_to} for all "
            f"tokens of a forward pass: the logprobs of a sample of up to {length} tokens would depend on its "
            f"neighbours and on what is sampled later; "
            + (f"set {setting} to at most {limit}" if limit is not None else "use a model without it")
        )
    model.longest_checked = length


@torch.no_grad()
def _moves(model: CausalLM, length: int) -> bool:
    """True if, in a tiny copy, the results of earlier tokens change when the last token moves to a far position,
    although earlier tokens cannot see the last token.

    This also finds encodings that `fixed_length` does not know by name.
    """
    pair = tiny_pair(model.model, planned=True)
    length = min(length, getattr(pair.ours.config, "max_position_embeddings", None) or length)
    if length <= WINDOW:
        return False
    ids = probe_ids(pair, WINDOW + 1)
    near = torch.arange(WINDOW + 1)
    far = near.clone()
    far[-1] = length - 1
    alone, beside = (pair.ours.hidden(ids, positions, WholeSequencePlan())[:-1] for positions in (near, far))
    return not bool((alone - beside).abs().max() <= TOLERANCE * alone.abs().max())
