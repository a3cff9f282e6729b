"""Checks that only attention mixes a model's tokens; only then can a plan isolate rows and branches from each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.models.attention import AttentionCall, WholeSequencePlan, follow_plans
from verbatim.models.head import DirectCalls, ModelCalls
from verbatim.models.own_attention import (
    TOLERANCE,
    PlanFault,
    mask_settings,
    probe_ids,
    raise_not_causal,
    tiny_pair,
)
from verbatim.models.refusal import FAULTS, describe
from verbatim.models.rope import probe_length

ROW = 6
"""Tokens in each of the two rows of the test."""
LEAK = 0.05
"""Relative difference above which one row counts as depending on the other. Rounding causes smaller differences, even
in bfloat16."""


def plan_attention(model: Any, calls: ModelCalls | None = None) -> str | None:
    """Make a model's attention follow an `AttentionPlan`.

    Returns:
        None if only attention mixes the tokens. Otherwise a description of what else mixes them; the model then keeps
        its own attention.

    Raises:
        ModelError: a token depends on later tokens, or the model cannot be compared with its own attention.
    """
    calls = calls or DirectCalls()
    _refuse_unless_causal(model, calls)
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        return f"{', '.join(kinds)} layers"
    if model._is_stateful:
        return "a recurrent state"
    if not model._supports_attention_backend:
        return "attention that cannot be replaced"
    what = _another_model(model)
    if what is not None:
        return what
    own: str = config._attn_implementation
    follow_plans(model)
    what = _leak(model, calls)
    if what is not None:
        model.set_attn_implementation(own)
    return what


@torch.no_grad()
def _refuse_unless_causal(model: Any, calls: ModelCalls) -> None:
    """Refuse a model whose predictions change with later tokens."""
    length = probe_length(model.config.get_text_config(), 8 * ROW)
    ids = torch.arange(length, device=model.device)[None] * 5 % model.get_input_embeddings().weight.shape[0]
    try:
        longer, alone = (
            calls.run(model, input_ids=x, use_cache=False).logits[0, :ROW].float() for x in (ids, ids[:, :ROW])
        )
        calls.release()
    except FAULTS as error:
        raise ModelError(
            f"{type(model).__name__} does not return logits when called with ids only ({describe(error)}); use a "
            "causal language model of another class"
        ) from error
    if not (longer - alone).norm() <= LEAK * alone.norm():  # `not <=`, so that NaN is refused too
        raise_not_causal(model)


@torch.no_grad()
def _another_model(model: Any) -> str | None:
    """How a tiny copy under a plan differs from a copy with its own attention, or None if the two agree.

    The configuration's layer types do not reveal every mask of a model, so the results are compared.
    """
    try:
        pair = tiny_pair(model, planned=True)
        ids = probe_ids(pair)
        hidden = pair.ours.hidden(ids, torch.arange(len(ids)), WholeSequencePlan())
        found = pair.ours.logits(hidden)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    except PlanFault as error:
        return str(error)
    except ModelError:
        raise
    except FAULTS as error:
        return str(PlanFault(error))
    difference = float((found - pair.own_logprobs(ids)).abs().max())
    if difference <= TOLERANCE:
        return None
    return (
        f"a mask of its own{mask_settings(model.config)}: under a plan the logprobs of a small copy differ by "
        f"{difference:.1g}"
    )


class _TwoRows(WholeSequencePlan):
    """A plan with two rows: the first `ROW` tokens, and the rest."""

    def attend(
        self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, call: AttentionCall
    ) -> Tensor:
        """The attention output, [1, T, H, D]."""
        rows = zip(
            *(torch.split_with_sizes(x, [ROW, ROW], dim=2) for x in (query_BHTD, key_BKTD, value_BKTD)), strict=True
        )
        attend = super().attend
        return torch.cat([attend(layer_index, query, key, value, call) for query, key, value in rows], dim=1)


@torch.no_grad()
def _leak(model: Any, calls: ModelCalls) -> str | None:
    """What carries information from one row to the next despite the plan that separates them, or None."""
    embedding = model.get_input_embeddings().weight
    row = torch.arange(ROW, device=embedding.device)

    def hidden(input_ids: Tensor, plan: WholeSequencePlan) -> Tensor:
        position_ids = row.repeat(len(input_ids) // ROW)
        out = calls.run(
            model.base_model,
            input_ids=input_ids[None] % len(embedding),
            position_ids=position_ids[None],
            use_cache=False,
            attention_plan=plan,
        )
        last: Tensor = out.last_hidden_state[0, -ROW:]
        return last.float()

    try:
        behind, alone = hidden(torch.cat([row + ROW, row]), _TwoRows()), hidden(row, WholeSequencePlan())
        calls.release()
    except NotImplementedError as error:
        return str(error)
    return "something besides its attention layers" if (behind - alone).norm() > LEAK * alone.norm() else None
