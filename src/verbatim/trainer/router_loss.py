"""Computes the load-balancing loss of a mixture of experts over a whole optimizer step.

For each layer with a router, let `f_e` be the share of the step's T tokens that expert e computes, and `P_e` the mean
router probability of expert e over these tokens (Fedus et al. 2021, "Switch Transformers", equations 4 to 6):

    loss = coefficient * mean over layers of  E * sum over e of  f_e * P_e

Before the coefficient, the loss is K if all experts have the same load. `f` has no gradient, and `P` is a sum over
tokens. So once `f` of the whole step is known, each micro-batch adds its own tokens' part of the loss, and packing does
not change the sum. A forward pass over the step without a graph measures `f`.

A token counts once for each target predicted from it. So a prefix that samples share has the same weight in a tree,
where it is computed once, as in rows. Padding and tokens without a target do not count.

Legend: T tokens of a pass, M targets of the step, L layers with a router, E experts, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.models.experts import RouterPass, Routers, find_routers, why_no_routers
from verbatim.models.refusal import refusing
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.parallel.ranks import Ranks


class RouterLoss:
    """The load-balancing loss: call `measure` with the micro-batches of an optimizer step, then run their passes.

    Args:
        lm: The model in training, which must have routers.
        coefficient: `trainer.router_aux_loss_coef`.
    """

    def __init__(self, lm: TargetLogprobs, coefficient: float) -> None:
        assert lm.model.routers is not None
        self._lm, self._coefficient = lm, coefficient
        self._num_layers, self._num_experts = len(lm.model.routers.layers), lm.model.routers.num_experts
        self._columns = [self._num_experts, self._num_experts, 1]
        """Widths of the per-layer sums over tokens: token counts [E], router probabilities [E], entropy [1]."""
        self._slope_LE = torch.zeros(0, device=lm.model.device)

    @torch.no_grad()
    def measure(
        self, batches: Sequence[DeviceBatch], ranks: Ranks | None, *, num_idle: int = 0
    ) -> tuple[dict[str, Tensor], float]:
        """Measure each expert's share of the tokens. Later passes over the same micro-batches add the loss's gradient.

        All ranks call this, each with its own micro-batches.

        Args:
            batches: This rank's micro-batches of the optimizer step.
            ranks: The processes of the trainer; None for one process.
            num_idle: Number of passes to make without a micro-batch, to keep up with the rank that has the most
                micro-batches.

        Returns:
            (1) Metrics over all ranks: `router/aux_loss` (before the coefficient), `router/load_max` (tokens of the
            busiest expert divided by the mean of its layer; the maximum over layers) and `router/entropy` (of a token's
            router probabilities, in nats; the mean over layers and targets). (2) The weight of these metrics: the
            number of targets. Ranks other than 0 return no metrics and a weight of 0, so that the metrics count only
            once.
        """
        device = self._lm.model.device
        # The sums are in float64, because the order of summation depends on packing and ranks, and the resulting
        # rounding error should not show.
        sums = torch.zeros(self._num_layers, sum(self._columns), dtype=torch.float64, device=device)
        weights = [_weights(batch) for batch in batches]
        for batch, weights_T in zip(batches, weights, strict=True):
            _observing(batch, partial(self._add_up, sums, weights_T))
            self._lm.hidden(batch)
        for _ in range(num_idle):
            self._lm.idle_pass()
        if ranks is not None:
            sums = ranks.total(sums.cpu()).to(device)
        self._lm.model.calls.release()
        counts_LE, probabilities_LE, entropy_L = sums.split_with_sizes(self._columns, dim=1)
        num_targets = sum(len(batch) for batch in batches)
        total = num_targets if ranks is None else int(ranks.total(torch.tensor([num_targets], device="cpu"))[0])
        share_LE = counts_LE / total
        self._slope_LE = self._coefficient * self._num_experts / (self._num_layers * total) * share_LE
        for batch, weights_T in zip(batches, weights, strict=True):
            _observing(batch, partial(self._attach, weights_T))
        balance_L = self._num_experts / total * (share_LE * probabilities_LE).sum(1)
        metrics = {
            "router/aux_loss": balance_L.mean(),
            "router/load_max": share_LE.max() / share_LE.mean(),
            "router/entropy": entropy_L.mean() / total,
        }
        return (metrics, total) if ranks is None or ranks.leads else ({}, 0)

    def _add_up(
        self,
        sums: Tensor,
        weights_T: Tensor,
        router: int,
        tokens: slice,
        logits_TE: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
    ) -> Tensor:
        """Observe one router: add its tokens to `sums`, and return the expert weights unchanged."""
        counted_T = weights_T[tokens]
        counts_E, probabilities_E, entropy_1 = sums[router].split_with_sizes(self._columns)
        log_TE = _log_probabilities(logits_TE).double()
        counts_E.index_add_(0, experts_TK.flatten(), counted_T.repeat_interleave(experts_TK.shape[1]))
        probabilities_E += counted_T @ log_TE.exp()
        entropy_1 -= counted_T @ (log_TE.exp() * log_TE).sum(-1)
        return weights_TK

    def _attach(
        self, weights_T: Tensor, router: int, tokens: slice, logits_TE: Tensor, weights_TK: Tensor, _: Tensor
    ) -> Tensor:
        """Observe one router: attach the gradient of this router's part of the loss to the expert weights."""
        if not torch.is_grad_enabled():  # this pass computes logprobs only
            return weights_TK
        probabilities_TE = _log_probabilities(logits_TE).exp()
        slope_E = self._slope_LE[router].to(probabilities_TE.dtype)
        weights_T1 = weights_T[tokens].to(probabilities_TE.dtype)[:, None]
        term = (weights_T1 * probabilities_TE * slope_E).sum()  # no matrix product: autocast would round it to bfloat16
        attached: Tensor = _Attach.apply(weights_TK, term)  # type: ignore[no-untyped-call]
        return attached


def _weights(batch: DeviceBatch) -> Tensor:
    """The number of targets predicted from each token: float64 [T]."""
    return torch.bincount(batch.source_positions_M, minlength=len(batch.input_ids_T)).double()


def _observing(batch: DeviceBatch, observe: Any) -> None:
    batch.router_pass = replace(batch.router_pass or RouterPass(), observe=observe)


def _log_probabilities(logits_TE: Tensor) -> Tensor:
    """Log-probabilities of a router's logits, in at least float32."""
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).log_softmax(-1)


class _Attach(torch.autograd.Function):
    """Returns its first argument unchanged. A backward pass through it also backpropagates the second argument, a
    scalar, with gradient 1. This adds the loss inside a layer, which returns no loss of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return grads[0], torch.ones_like(term)


def router_loss(lm: TargetLogprobs, coefficient: float) -> RouterLoss | None:
    """The load-balancing loss of a model; None if the coefficient is 0.

    Raises:
        ModelError: a dense model, or one whose class has no load-balancing loss in `transformers`.
    """
    if not coefficient:
        return None
    refuse_without_router_loss(lm.model.model, lm.model.routers)
    return RouterLoss(lm, coefficient)


def check_router_loss(model_config: Any) -> None:
    """Refuse what `router_loss` would refuse, without loading weights. A run calls it before its warm start, so that
    the warm start's work is not lost to a mistake in the configuration.

    Args:
        model_config: The model's `transformers` configuration.

    Raises:
        ModelError: as for `router_loss`.
    """
    from transformers import AutoModelForCausalLM

    with refusing(f"a model of {type(model_config).__name__} cannot be made"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    refuse_without_router_loss(model, find_routers(model))


def refuse_without_router_loss(model: Any, routers: Routers | None) -> None:
    """Refuse a model without a load-balancing loss.

    Raises:
        ModelError: a dense model, or one whose class has no load-balancing loss in `transformers`.
    """
    if routers is None:
        what = why_no_routers(model)
    elif not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        what = "transformers has no such loss for this class, which balances its experts in another way or not at all"
    else:
        return
    raise ModelError(
        f"trainer.router_aux_loss_coef asks for the load-balancing loss of {type(model).__name__}, but "
        f"{what}; leave it out"
    )
