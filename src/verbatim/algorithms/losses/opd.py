"""On-policy distillation: reverse KL to a teacher, on the student's own samples."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ratios import clamped_ratio, ratio_metrics, share, trained_teacher, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import NonNegativeFloat, PositiveFloat


def opd_loss(
    inputs: LossInputs,
    *,
    kl_tau: NonNegativeFloat = 1e-3,
    delta: PositiveFloat = 8.0,
    kl_ref_tau: NonNegativeFloat = 0.0,
    kl_ref: Estimator = "k2",
) -> LossOutputs:
    """The sum over trained tokens of a policy gradient with the teacher's log ratio as advantage, plus a KL term.

    ```
    w    = exp(l - m)                l trainer_logprobs, m inference_logprobs, t teacher_logprobs
    loss = sum_t  -sg(t - l) min(w, delta)  +  kl_tau (l - m)^2
    ```

    On samples of the current policy, the expected gradient equals the gradient of the reverse KL `E[l - t]` per token.
    Advantages are not used. `min(w, delta)` has no gradient where it is clamped.

    Example: `t = log 0.5`, `l = m = log 0.25`: `w = 1`, and both the loss and its gradient are `-log 2`.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        kl_tau: Weight of the KL term to the sampling policy.
        delta: Upper clamp of the importance ratio; `inf` for no clamp.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss; the metrics of `ratio_metrics`, where `masked_by_loss` is 0; `teacher_kl` = mean(l - t); and
        `clipped_high`, the share of tokens whose ratio is clamped.

    Raises:
        ComponentError: a parameter is outside its range, there are no teacher logprobs, or `kl_ref_tau` is set without
            a reference.
    """
    refuse_bad_parameters(opd_loss, kl_tau=kl_tau, delta=delta, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    trainer, inference, _ = trained_tokens(inputs)
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref, delta=delta)
    behind = trained_teacher(inputs, "opd") - trainer.detach()
    learned = behind - reference.penalty
    log_ratio = trainer - inference
    surrogate = -learned * clamped_ratio(log_ratio, learned, delta)
    loss = (surrogate + kl_tau * log_ratio.square() + reference.terms).sum()
    clipped = log_ratio.detach().exp() > delta
    metrics = {
        **ratio_metrics(log_ratio),
        "teacher_kl": -behind.mean(),
        "clipped_high": share(clipped, behind),
    }
    return LossOutputs(loss=loss, metrics=metrics)
