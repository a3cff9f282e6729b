"""GSPO: one importance ratio for the whole trajectory, clipped as in PPO (arXiv 2507.18071)."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ppo import clipped_surrogate
from verbatim.algorithms.losses.ratios import share, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import Fraction, NonNegativeFloat


def gspo_loss(
    inputs: LossInputs,
    *,
    eps_low: Fraction = 3e-4,
    eps_high: NonNegativeFloat = 4e-4,
    kl_ref_tau: NonNegativeFloat = 0.0,
    kl_ref: Estimator = "k2",
) -> LossOutputs:
    """The mean over one trajectory's trained tokens of PPO's surrogate, with the trajectory's importance ratio.

    ```
    s    = exp(mean_t(l - m))                  over all trained tokens of the trajectory
    loss = mean_t  -min(s A_t, clip(s, 1 - eps_low, 1 + eps_high) A_t)
    ```

    The trainer divides by the number of trajectories, so long and short trajectories have the same weight. The
    clip bounds are narrow because the mean of many log ratios varies little.

    Example: two tokens with `l - m = log 4` and `log 1`: `s = 2`. With `A = -1` for both, the loss is 2 and each
    gradient is `s / 2 = 1`. With `A = 1`, the loss is -1.0004 and there is no gradient.

    Args:
        inputs: A whole trajectory, float [seq] tensors; only tokens under `loss_mask` are read.
        eps_low: A trajectory with A < 0 has no gradient once its ratio is below 1 - eps_low.
        eps_high: A trajectory with A > 0 has no gradient once its ratio is above 1 + eps_high.
        kl_ref_tau: Weight of the reference KL term (`reference_term`), which is averaged over the trajectory's tokens
            like the surrogate; 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss, and the metrics `sequence_ratio_{mean,min,max}`, `clipped_{low,high}` (shares of the trajectory's
        tokens) and `masked_by_loss`: the number of clipped tokens if every token that is not clipped has advantage 0;
        otherwise 0, because a token that is not clipped and has another advantage moves the ratio that all tokens
        share.

    Raises:
        ComponentError: a parameter is outside its range, or `kl_ref_tau` is set without a reference.
    """
    refuse_bad_parameters(gspo_loss, eps_low=eps_low, eps_high=eps_high, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    trainer, inference, advantages = trained_tokens(inputs, reference.penalty)
    log_ratio = (trainer - inference).mean()
    terms, low, high = clipped_surrogate(
        log_ratio.expand_as(advantages), advantages, eps_low=eps_low, eps_high=eps_high
    )
    ratio, clipped = log_ratio.detach().exp(), low | high
    metrics = {
        "sequence_ratio_mean": ratio,
        "sequence_ratio_min": ratio,
        "sequence_ratio_max": ratio,
        "clipped_low": share(low, advantages),
        "clipped_high": share(high, advantages),
        "masked_by_loss": clipped.sum() * (clipped | (advantages == 0)).all(),
    }
    return LossOutputs(loss=(terms + reference.terms).mean(), metrics=metrics)
