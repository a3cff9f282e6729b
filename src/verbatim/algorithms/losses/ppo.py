"""PPO's clipped surrogate with separate bounds (arXiv 1707.06347, 2503.14476), and the dual clip (1912.09729)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ratios import at_least, at_most, ratio_metrics, share, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import Fraction, NonNegativeFloat

if TYPE_CHECKING:
    from torch import Tensor

AboveOne = Annotated[float, Field(gt=1)]


def ppo_loss(
    inputs: LossInputs,
    *,
    eps_low: Fraction = 0.2,
    eps_high: NonNegativeFloat = 0.28,
    dual_clip: AboveOne | None = None,
    kl_ref_tau: NonNegativeFloat = 0.0,
    kl_ref: Estimator = "k2",
) -> LossOutputs:
    """The sum over trained tokens of PPO's pessimistic surrogate.

    ```
    w    = exp(l - m)                          l trainer_logprobs, m inference_logprobs, A advantages
    s    = min(w A, clip(w, 1 - eps_low, 1 + eps_high) A)
    loss = sum_t  -s                           with a dual clip c, where A < 0:  -max(s, c A)
    ```

    Without the dual clip, `w` is unbounded where A < 0. So a token that has become much more likely since sampling can
    have an unbounded gradient.

    Example: `l = log 0.5`, `m = log 0.25`: `w = 2`. With `A = 1`, `w` is clipped to 1.28: the loss is -1.28, without
        gradient. With `A = -1`, `w` is not clipped: the loss is 2 and the gradient is 2. With `dual_clip = 1.5` the
        loss is
    1.5, without gradient.

    Args:
        inputs: float [seq] tensors; only tokens under `loss_mask` are read.
        eps_low: A token with A < 0 has no gradient once its ratio is below 1 - eps_low.
        eps_high: A token with A > 0 has no gradient once its ratio is above 1 + eps_high.
        dual_clip: A token with A < 0 has no gradient while its ratio is above this; 3 is common. None to switch the
            dual clip off.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss, and as metrics those of `ratio_metrics`, where clipped tokens count as masked, and
        `clipped_{low,high}`, the shares of tokens clipped on each side.

    Raises:
        ComponentError: a parameter is outside its range, or `kl_ref_tau` is set without a reference.
    """
    refuse_bad_parameters(
        ppo_loss, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref
    )
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    trainer, inference, advantages = trained_tokens(inputs, reference.penalty)
    log_ratio = trainer - inference
    terms, low, high = clipped_surrogate(log_ratio, advantages, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)
    metrics = {
        **ratio_metrics(log_ratio, low | high),
        "clipped_low": share(low, advantages),
        "clipped_high": share(high, advantages),
    }
    return LossOutputs(loss=(terms + reference.terms).sum(), metrics=metrics)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (1) PPO's term for each token, (2) a mask of the ratios that are clipped below and (3) a mask of those
    clipped above: three tensors [M].

    For a given sign of A, the minimum and maximum in the formula reduce to one bound on each side of the ratio:
    `-A min(w, 1 + eps_high)` where A > 0, `-A min(max(w, 1 - eps_low), c)` where A < 0. Exactly at a bound the gradient
    is that of the unclipped ratio.
    """
    up = advantages > 0
    # Bound before exp, and use 0 where A = 0: otherwise exp may overflow, and 0 times infinity is a NaN gradient.
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    ceiling = advantages.new_full(advantages.shape, highest).masked_fill(up, math.log1p(eps_high))
    floor = advantages.new_full(advantages.shape, 1 - eps_low).masked_fill(up, 0.0)
    log_ratio = log_ratio.masked_fill(advantages == 0, 0.0)
    ratio = at_most(log_ratio, ceiling).exp()
    terms = -advantages * at_least(ratio, floor)
    return terms, ratio.detach() < floor, log_ratio.detach() > ceiling
