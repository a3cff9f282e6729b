"""Truncated importance sampling: the importance weight has an upper bound and no gradient."""

from __future__ import annotations

from verbatim.algorithms.losses.cispo import bounded_weights
from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import NonNegativeFloat, PositiveFloat


def tis_loss(
    inputs: LossInputs, *, cap: PositiveFloat = 2.0, kl_ref_tau: NonNegativeFloat = 0.0, kl_ref: Estimator = "k2"
) -> LossOutputs:
    """The sum over trained tokens of weighted log-likelihoods.

    ```
    w    = exp(l - m)                          l trainer_logprobs, m inference_logprobs, A advantages
    loss = sum_t  -sg(min(w, cap)) A l
    ```

    Example: `l = log 0.6`, `m = log 0.2`, `A = -1`: `w = 3` is clipped to 2, and the gradient is 2.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        cap: Upper bound of the weight; `inf` for no bound.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss; the metrics of `ratio_metrics`, where `masked_by_loss` is 0; and `clipped_{low,high}`, the shares of
        trained tokens whose weight is clipped at each bound.

    Raises:
        ComponentError: a parameter is outside its range, or `kl_ref_tau` is set without a reference.
    """
    refuse_bad_parameters(tis_loss, cap=cap, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    return bounded_weights(inputs, 0.0, cap, reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref))
