"""The default loss: importance-weighted policy gradient with a DPPO mask, and a KL term (arXiv 2602.04879)."""

from __future__ import annotations

import math

from verbatim.errors import ComponentError
from verbatim.losses.base import LossInputs, LossOutputs


def default_loss(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    delta: float = 8.0,
) -> LossOutputs:
    """The sum over trained tokens of policy gradient and KL term.

    ```
    w    = exp(l - m)                   l trainer_logprobs, m inference_logprobs, A advantages
    d    = exp(l) - exp(m)              detached
    drop = (A > 0) & (d > dppo_mask_high)  |  (A <= 0) & (d < -dppo_mask_low)
    loss = sum_t  -[not drop] adv_tau A min(w, delta)  +  kl_tau (l - m)^2
    ```

    `min(w, delta)` has no gradient where it clamps; the KL term covers dropped tokens too.

    Example: `l = log 0.5`, `m = log 0.25`, `A = 1`: `w = 2`, `d = 0.25 > 0.2`, so the policy gradient is dropped
    and `kl_tau (log 2)^2` is left.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        dppo_mask_low: Tokens with A <= 0 are dropped where the probability fell by more than this since sampling.
        dppo_mask_high: Tokens with A > 0 are dropped where the probability rose by more than this.
        adv_tau: Weight of the policy gradient.
        kl_tau: Weight of the KL term.
        delta: Upper clamp of the importance ratio; `inf` = none.

    Returns:
        The loss; metrics `mismatch_kl` = mean(w - log w - 1), `importance_ratio_{mean,min,max}`,
        `dppo_dropped_{low,high}` (shares of the trained tokens) and `masked_by_loss` (how many were dropped).

    Raises:
        ComponentError: `delta` is not above 0.
    """
    if not delta > 0:
        raise ComponentError(f"trainer.loss.delta = {delta}: the clamp of the importance ratio is a number above 0; "
                             "the default is 8.0, and inf switches it off")  # fmt: skip
    trainer = inputs.trainer_logprobs[inputs.loss_mask]
    inference = inputs.inference_logprobs[inputs.loss_mask]
    advantages = inputs.advantages[inputs.loss_mask]

    log_ratio = trainer - inference
    moved = (trainer.exp() - inference.exp()).detach()
    dropped_high = (advantages > 0) & (moved > dppo_mask_high)
    dropped_low = (advantages <= 0) & (moved < -dppo_mask_low)
    dropped = dropped_high | dropped_low
    kept = advantages.masked_fill(dropped, 0.0)
    # Filled and clamped before exp, not after: where exp overflows, a gradient of 0 behind it would become 0 * inf.
    ratio = log_ratio.masked_fill(kept == 0, 0.0).clamp(max=math.log(delta)).exp()
    loss = (-adv_tau * kept * ratio + kl_tau * log_ratio.square()).sum()

    log_ratio = log_ratio.detach()
    full_ratio = log_ratio.exp()
    metrics = {
        "mismatch_kl": (log_ratio.expm1() - log_ratio).mean(),
        "importance_ratio_mean": full_ratio.mean(),
        "importance_ratio_min": full_ratio.min(),
        "importance_ratio_max": full_ratio.max(),
        "dppo_dropped_low": dropped_low.to(log_ratio.dtype).mean(),
        "dppo_dropped_high": dropped_high.to(log_ratio.dtype).mean(),
        "masked_by_loss": dropped.sum(),
    }
    return LossOutputs(loss=loss, metrics=metrics)
