"""The KL term to a frozen reference model. The logprob stream "reference" has that model's logprobs of the sampled
tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verbatim.algorithms.losses.loss import LossInputs
from verbatim.algorithms.losses.ratios import clamped_ratio, k3
from verbatim.core.errors import ComponentError
from verbatim.core.records.fields import REFERENCE

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
DELTA = 8.0
"""Upper clamp of the importance ratio that weights the term, for losses without their own `delta`."""


@dataclass(frozen=True, eq=False)
class ReferenceTerm:
    """The reference KL term in two parts, both of which a loss has to include."""

    penalty: Tensor | float = 0.0
    """What is subtracted from each token's advantage before anything else: float [M], detached."""
    terms: Tensor | float = 0.0
    """What is added to each token's term of the loss: float [M]."""


def reference_term(
    inputs: LossInputs, *, kl_ref_tau: float, kl_ref: Estimator = "k2", delta: float = DELTA
) -> ReferenceTerm:
    """The KL divergence of the policy from the reference, with one of three estimators.

    ```
    k1   A - kl_ref_tau sg(l - r)                          r the stream "reference", l trainer_logprobs
    k2   + kl_ref_tau sg(min(w, delta)) (l - r)^2 / 2      w = exp(l - m), m inference_logprobs
    k3   + kl_ref_tau sg(min(w, delta)) (exp(r - l) - (r - l) - 1)      where r - l > 20: along its tangent
    ```

    On samples of the current policy, k1 and k2 have the expected gradient of the reverse KL, `E[l - r]`; k3, which is
    commonly used, does not (arXiv 2510.01555). As a loss term, k1 would have an expected gradient of 0, so k1 is
    subtracted from the advantage instead. Source of the estimators: Schulman, "Approximating KL divergence" (2020).

    Example: `l = m = log 0.5`, `r = log 0.25`, `kl_ref_tau = 1`: k2 is `(log 2)^2 / 2` with the gradient `log 2`, k3 is
    `0.5 + log 2 - 1` with the gradient `1 - 0.5`, and k1 subtracts `log 2` from the advantage.

    Args:
        inputs: float [seq] tensors; only the M tokens under `loss_mask` are read.
        kl_ref_tau: Weight of the term; 0 to use no reference.
        kl_ref: The estimator.
        delta: Upper clamp of the importance ratio.

    Raises:
        ComponentError: `kl_ref_tau` is above 0, but the stream is missing.
    """
    if not kl_ref_tau:
        return ReferenceTerm()
    stream = inputs.logprob_streams.get(REFERENCE)
    if stream is None:
        raise ComponentError(
            f'kl_ref_tau > 0 needs a reference, but the batch has no logprob stream "{REFERENCE}"; add a '
            "[trainer.reference] table to the run's file"
        )
    mask = inputs.loss_mask
    trainer, ahead = inputs.trainer_logprobs[mask], stream[mask] - inputs.trainer_logprobs[mask]
    if kl_ref == "k1":
        return ReferenceTerm(penalty=-kl_ref_tau * ahead.detach())
    log_ratio = (trainer - inputs.inference_logprobs[mask]).detach()
    weights = kl_ref_tau * clamped_ratio(log_ratio, log_ratio.new_ones(()), delta)
    return ReferenceTerm(terms=weights * (ahead.square() / 2 if kl_ref == "k2" else k3(ahead)))
