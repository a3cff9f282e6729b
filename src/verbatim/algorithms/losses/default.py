"""The default loss: importance-weighted policy gradient with a DPPO mask, and a KL term (arXiv 2602.04879)."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ratios import clamped_ratio, ratio_metrics, share, trained_teacher, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import NonNegativeFloat, PositiveFloat


def default_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: NonNegativeFloat = 0.2,
    dppo_mask_high: NonNegativeFloat = 0.2,
    adv_tau: NonNegativeFloat = 1.0,
    teacher_tau: NonNegativeFloat = 0.0,
    kl_tau: NonNegativeFloat = 1e-3,
    delta: PositiveFloat = 8.0,
    kl_ref_tau: NonNegativeFloat = 0.0,
    kl_ref: Estimator = "k2",
) -> LossOutputs:
    """The sum over trained tokens of a policy gradient and a KL term.

    ```
    A    = adv_tau A_rl + teacher_tau (t - l)    l trainer_logprobs, t teacher_logprobs; detached
    w    = exp(l - m)                            m inference_logprobs
    d    = exp(l) - exp(m)                       detached
    drop = (A > 0) & (d > dppo_mask_high)  |  (A <= 0) & (d < -dppo_mask_low)
    loss = sum_t  -[not drop] A min(w, delta)  +  kl_tau (l - m)^2
    ```

    `min(w, delta)` has no gradient where it is clamped; the KL term also applies to dropped tokens.

    Example: `l = log 0.5`, `m = log 0.25`, `A = 1`: `w = 2`, `d = 0.25 > 0.2`, so the policy gradient is dropped
    and `kl_tau (log 2)^2` is left.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        dppo_mask_low: Drop tokens with A <= 0 whose probability fell by more than this since sampling.
        dppo_mask_high: Drop tokens with A > 0 whose probability rose by more than this since sampling.
        adv_tau: Weight of the advantage.
        teacher_tau: Weight of the teacher's log ratio; 0 to use no teacher.
        kl_tau: Weight of the KL term to the sampling policy.
        delta: Upper clamp of the importance ratio; `inf` for no clamp.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss, and these metrics: the metrics of `ratio_metrics`, the shares `dppo_dropped_{low,high}`, and
        `teacher_kl` if there is a teacher.

    Raises:
        ComponentError: a parameter is outside its range, or `teacher_tau` or `kl_ref_tau` is set without the needed
            logprobs.
    """
    refuse_bad_parameters(
        default_loss,
        dppo_mask_low=dppo_mask_low,
        dppo_mask_high=dppo_mask_high,
        adv_tau=adv_tau,
        teacher_tau=teacher_tau,
        kl_tau=kl_tau,
        delta=delta,
        kl_ref_tau=kl_ref_tau,
        kl_ref=kl_ref,
    )
    trainer, inference, advantages = trained_tokens(inputs)
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref, delta=delta)
    advantages = adv_tau * advantages - reference.penalty
    metrics = {}
    if teacher_tau:
        behind = trained_teacher(inputs, "teacher_tau > 0") - trainer.detach()
        advantages = advantages + teacher_tau * behind
        metrics["teacher_kl"] = -behind.mean()

    log_ratio = trainer - inference
    moved = (trainer.exp() - inference.exp()).detach()
    dropped_high = (advantages > 0) & (moved > dppo_mask_high)
    dropped_low = (advantages <= 0) & (moved < -dppo_mask_low)
    kept = advantages.masked_fill(dropped_high | dropped_low, 0.0)
    terms = -kept * clamped_ratio(log_ratio, kept, delta) + kl_tau * log_ratio.square() + reference.terms
    metrics |= {
        **ratio_metrics(log_ratio, dropped_high | dropped_low),
        "dppo_dropped_low": share(dropped_low, moved),
        "dppo_dropped_high": share(dropped_high, moved),
    }
    return LossOutputs(loss=terms.sum(), metrics=metrics)
