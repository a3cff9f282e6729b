"""CISPO: the importance weight is clipped and has no gradient, so that every token keeps learning (arXiv
2506.13585)."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ratios import ratio_metrics, share, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, ReferenceTerm, reference_term
from verbatim.config.schema import Fraction, NonNegativeFloat


def cispo_loss(
    inputs: LossInputs,
    *,
    eps_low: Fraction = 1.0,
    eps_high: NonNegativeFloat = 5.0,
    kl_ref_tau: NonNegativeFloat = 0.0,
    kl_ref: Estimator = "k2",
) -> LossOutputs:
    """The sum over trained tokens of weighted log-likelihoods.

    ```
    w    = exp(l - m)                          l trainer_logprobs, m inference_logprobs, A advantages
    loss = sum_t  -sg(clip(w, 1 - eps_low, 1 + eps_high)) A l
    ```

    PPO removes the gradient of a clipped token; CISPO bounds its weight instead.

    Example: `l = log 0.8`, `m = log 0.1`, `A = 1`: `w = 8` is clipped to 6, and the gradient is -6.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        eps_low: The weight is at least 1 - eps_low; 1 for no lower bound.
        eps_high: The weight is at most 1 + eps_high.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss; the metrics of `ratio_metrics`, where `masked_by_loss` is 0; and `clipped_{low,high}`, the shares of
        trained tokens whose weight is clipped at each bound.

    Raises:
        ComponentError: a parameter is outside its range, or `kl_ref_tau` is set without a reference.
    """
    refuse_bad_parameters(cispo_loss, eps_low=eps_low, eps_high=eps_high, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    return bounded_weights(inputs, 1 - eps_low, 1 + eps_high, reference)


def bounded_weights(inputs: LossInputs, lowest: float, highest: float, reference: ReferenceTerm) -> LossOutputs:
    """`sum_t -sg(clip(w, lowest, highest)) A l` plus the reference KL term, with metrics."""
    trainer, inference, advantages = trained_tokens(inputs, reference.penalty)
    log_ratio = (trainer - inference).detach()
    ratio = log_ratio.exp()
    low, high = ratio < lowest, ratio > highest
    # Without an upper bound the weight may be infinite, and infinity times an advantage of 0 would be NaN.
    weights = ratio.clamp(lowest, highest).masked_fill(advantages == 0, 0.0) * advantages
    metrics = {
        **ratio_metrics(log_ratio),
        "clipped_low": share(low, ratio),
        "clipped_high": share(high, ratio),
    }
    return LossOutputs(loss=(reference.terms - weights * trainer).sum(), metrics=metrics)
