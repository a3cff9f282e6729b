"""Runs a tiny copy of a model with its own attention, as the reference for all plans.

A model's own mask may do what no plan reproduces, such as a window that its layers do not pass to the attention
function, or a selection of keys by content. Under a plan such a model runs without an error, but computes something
else. So logprobs and gradients under a plan are compared with the logprobs and gradients of the model's own attention.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.models.attention import follow_plans
from verbatim.models.head import CausalLM
from verbatim.models.refusal import FAULTS, describe
from verbatim.models.rope import probe_length
from verbatim.models.tiny import WINDOW, NoTinyCopy, tiny_copy

LENGTH = 3 * WINDOW
"""Number of tokens in a probe, which is several times the window of a tiny copy."""
TOLERANCE = 2e-3
"""Maximum difference attributed to float32 rounding: absolute for logprobs, relative to the norm for gradients."""
CAUSAL = 2e-2
"""If a log probability differs by at most this between passes of different lengths, the difference is attributed to
rounding."""
SMALL = 1e-2
"""Floor for the norm that a gradient difference is divided by, as a share of the largest gradient norm. Some gradients,
like the gradient of the key bias, are 0 except for rounding, so that their relative difference would be noise."""

_MASKS = (
    "use_sliding_window",
    "sliding_window",
    "use_bidirectional_attention",
    "is_decoder",
    "keep_window_size",
    "attention_chunk_size",
    "window_size",
    "alibi",
    "index_topk",
    "attention_dropout",
    "attn_logit_softcapping",
)
"""Configuration fields that affect the attention mask. Messages list the fields that are set."""

Gradient = Mapping[str, Tensor]
"""Gradients by parameter name."""


class PlanFault(ModelError):
    """The model's attention cannot be replaced by a plan."""

    def __init__(self, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        is_ours = isinstance(cause, NotImplementedError)  # raised by one of our plans, with a message written for users
        super().__init__(str(cause) if is_ours else f"attention that no plan can replace ({describe(cause)})")


@dataclass(frozen=True, eq=False)
class TinyPair:
    """Two tiny models with the same weights. Their parameters have no gradients between uses."""

    own: Any
    """The model with the attention of `transformers`."""
    ours: CausalLM
    """The model as Verbatim runs it."""

    def own_logprobs(self, ids_L: Tensor) -> Tensor:
        """log p(token t | tokens before) for t >= 1, in `transformers`' own forward pass: float32 [L - 1]."""
        logits: Tensor = self.own(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids_L[1:, None])[:, 0]


def probe_ids(pair: TinyPair, length: int = LENGTH, *, seed: int = 0) -> Tensor:
    """Random ids of the tiny vocabulary: int64 [length]."""
    return torch.randint(pair.ours.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def weights_of(offsets: Tensor) -> Tensor:
    """A loss weight for each target, computed from its offset in the sequence: float32, of the same shape as `offsets`.
    With equal weights, the errors of different tokens could cancel."""
    return torch.cos(offsets.float())


def gradient(model: Any, backward: Callable[[], None]) -> Gradient:
    """The gradients of one backward pass. The parameters have no gradients before and after the call."""
    try:
        backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad(set_to_none=True)


def differences(found: Gradient, expected: Gradient) -> dict[str, float]:
    """Relative difference of each parameter's gradient: the norm of the difference, divided by the norm of the expected
    gradient (or by a floor, see `SMALL`). NaN becomes infinity."""
    floor = SMALL * max((float(g.norm()) for g in expected.values()), default=0.0)
    relative = {}
    for name in found.keys() | expected.keys():
        a, b = found.get(name), expected.get(name)
        difference = a if b is None else b if a is None else a - b
        assert difference is not None
        norm = 0.0 if b is None else float(b.norm())
        relative[name] = float((difference.norm() / max(norm, floor, 1e-30)).nan_to_num(nan=torch.inf))
    return relative


def largest_difference(found: Gradient, expected: Gradient) -> float:
    """The largest of `differences`."""
    return max(differences(found, expected).values(), default=0.0)


def tiny_pair(model: Any, *, planned: bool) -> TinyPair:
    """Two tiny copies of a model: one with its own attention, one as Verbatim runs it, under a plan if `planned`.

    Pairs are cached by class and configuration, because a run loads the same model several times.

    Raises:
        ModelError: no small copy can be made or called, or its logits are not its head applied to its last hidden
            state.
        PlanFault: the same fault occurs, but only under a plan.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "torch_dtype", "_name_or_path")}
    key = (type(model), planned, json.dumps(config, sort_keys=True, default=str))
    pair = _pairs.pop(key, None)
    if pair is None:
        own = tiny_copy(model)
        if getattr(own.config.get_text_config(), "attn_logit_softcapping", None):
            own.set_attn_implementation("eager")  # older transformers take sdpa by default, which has no soft caps
        _refuse_unless_it_works(own)
        ours = copy.deepcopy(own)
        if planned:
            follow_plans(ours)
        CausalLM(own)  # built first: a fault of the head is raised here, so an error below is the plan's
        try:
            pair = TinyPair(own, CausalLM(ours))
        except ModelError as error:
            raise PlanFault(error) from error
    _pairs[key] = pair
    while len(_pairs) > _KEPT:
        _pairs.pop(next(iter(_pairs)))
    return pair


_pairs: dict[tuple[type, bool, str], TinyPair] = {}
_KEPT = 4
"""Number of cached pairs; `tiny_pair` evicts the least recently used pair."""


def _refuse_unless_it_works(own: Any) -> None:
    """Refuse a tiny copy that cannot be called, gives logits that are not finite, or is not causal."""
    try:
        with torch.no_grad():
            ids = torch.arange(8)[None] % own.get_input_embeddings().weight.shape[0]
            finite = bool(own(input_ids=ids, use_cache=False).logits.isfinite().all())
        if finite:
            _refuse_unless_causal(own)
    except ModelError:
        raise
    except FAULTS as error:
        raise NoTinyCopy(
            f"{type(own).__name__} cannot be checked against its own attention, because no small copy of "
            f"it returns logits when called with ids only ({describe(error)}); use a causal language model of "
            "another class"
        ) from error
    if not finite:
        raise NoTinyCopy(
            f"{type(own).__name__} returns logits that are not finite in a small copy with random weights, so "
            "it cannot be checked against its own attention; use a model of another class"
        )


@torch.no_grad()
def _refuse_unless_causal(own: Any) -> None:
    """Refuse a model whose predictions depend on later tokens in sequences longer than a window.

    Some models select keys by content once there are more keys than fit into a window, so lengths below and above the
    window are tried.
    """
    vocab_size, most = own.get_input_embeddings().weight.shape[0], probe_length(own.config.get_text_config(), LENGTH)
    ids = torch.randint(vocab_size, (most,), generator=torch.Generator().manual_seed(1))
    whole = own(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    for length in (WINDOW // 2, WINDOW + 3, 2 * WINDOW + 5):
        alone = own(input_ids=ids[None, :length], use_cache=False).logits[0].float().log_softmax(-1)
        if not (whole[: len(alone)] - alone).abs().max() <= CAUSAL:
            raise_not_causal(own)


def raise_not_causal(model: Any) -> NoReturn:
    """Raise the error for a model in which a token depends on later tokens.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"{type(model).__name__}{mask_settings(model.config)}: its predictions change with later tokens, so it "
        "cannot be sampled token by token; if the model was trained with causal attention, set that in its "
        "config.json (is_decoder = true, or use_bidirectional_attention = false), or use another model"
    )


def mask_settings(config: Any) -> str:
    """The mask settings of a configuration, as part of a message: " (sliding_window = 4096)"; "" if none is set."""
    config = config.get_text_config()
    found = [(name, getattr(config, name, None)) for name in _MASKS]
    text = ", ".join(f"{name} = {value}" for name, value in found if value or (name == "is_decoder" and value is False))
    return f" ({text})" if text else ""
