"""Contains helpers for losses: trained tokens, importance ratios that never overflow to NaN, and segment means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verbatim.algorithms.losses.loss import LossInputs
from verbatim.core.errors import ComponentError

if TYPE_CHECKING:
    from torch import Tensor


def trained_tokens(inputs: LossInputs, penalty: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """`l`, `m` and `A` (minus the reference's penalty) of the tokens under the mask, each float [M].

    Values outside the mask are never read.
    """
    mask = inputs.loss_mask
    return inputs.trainer_logprobs[mask], inputs.inference_logprobs[mask], inputs.advantages[mask] - penalty


def trained_teacher(inputs: LossInputs, what: str) -> Tensor:
    """The teacher's logprobs of the tokens under the mask: float [M].

    Raises:
        ComponentError: `what` needs teacher logprobs, but the batch has none.
    """
    if inputs.teacher_logprobs is None:
        raise ComponentError(f"{what} learns from a teacher, but the batch has no teacher_logprobs")
    return inputs.teacher_logprobs[inputs.loss_mask]


def clamped_ratio(log_ratio: Tensor, weights: Tensor, delta: float) -> Tensor:
    """`min(exp(log_ratio), delta)`, which has no gradient where it is clamped; 1 where the weight is 0.

    The log ratio is filled and clamped before exp: after an overflow in exp, a gradient of 0 would become 0 * inf =
    NaN.
    """
    return at_most(log_ratio.masked_fill(weights == 0, 0.0), math.log(delta)).exp()


def at_most(values: Tensor, bound: Tensor | float) -> Tensor:
    """`min(values, bound)`. Where a value is exactly the bound, the gradient is that of the value; NaN stays NaN.

    Not `clamp`: at a bound its gradient is 1 in torch 2.13, and in torch 2.14 it is 0, or 1/2 if the bound is a tensor.
    """
    return values.where(~(values > bound), bound)


def at_least(values: Tensor, bound: Tensor | float) -> Tensor:
    """`max(values, bound)`, with the gradient of `at_most` at the bound."""
    return values.where(~(values < bound), bound)


LARGEST_EXPONENT = 20.0
"""The log ratio from which on `k3` is linear."""


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's low-variance KL estimate `exp(x) - x - 1` of log ratios x.

    Above x = 20 it continues along its tangent, `exp(20) - 21 + (exp(20) - 1) (x - 20)`. There the policy has almost
    abandoned the token, and from x = 89 on, exp overflows float32, so the loss would not be finite. verl and slime
    clamp x at 20, which leaves such a token without a gradient; the tangent keeps the gradient that restores it.

    Example: x = 20 gives 485165174.4, and x = 120 gives 49001684615.4.
    """
    within = at_most(log_ratio, LARGEST_EXPONENT)
    # expm1 keeps precision for small x, where exp(x) - 1 would cancel.
    return within.expm1() - within + (log_ratio - LARGEST_EXPONENT).relu() * math.expm1(LARGEST_EXPONENT)


def segment_means(values: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1) the mean of each segment and (2) for each value the index of its segment in the means.

    Values belong to the same segment if their segment numbers are equal; the values of a segment need not be adjacent.

    Args:
        values: Float [M].
        segments: Number of each value's segment: int [M].

    Example: values `[1, 4, 5]` in segments `[7, 2, 7]` give the means `[4, 3]` of segments 2 and 7, and the indices
    `[1, 0, 1]`.
    """
    numbers, places = segments.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    zeros = values.new_zeros(len(numbers))
    counts = zeros.index_add(0, places, values.new_ones(len(values)))
    return zeros.index_add(0, places, values) / counts, places


def ratio_metrics(log_ratio: Tensor, masked: Tensor | None = None) -> dict[str, Tensor]:
    """The metrics that every loss with an importance ratio reports, over its M tokens.

    Args:
        log_ratio: `l - m`, float [M].
        masked: True for tokens whose policy gradient the loss removes, bool [M], or None if the loss removes no
            gradient.

    Returns:
        `mismatch_kl` = mean(w - log w - 1), `importance_ratio_{mean,min,max}`, and the count `masked_by_loss`.
    """
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {
        "mismatch_kl": (log_ratio.expm1() - log_ratio).mean(),
        "importance_ratio_mean": ratio.mean(),
        "importance_ratio_min": ratio.min(),
        "importance_ratio_max": ratio.max(),
        "masked_by_loss": log_ratio.new_zeros(()) if masked is None else masked.sum(),
    }


def share(of: Tensor, like: Tensor) -> Tensor:
    """The share of True values in a bool tensor, in the dtype of `like`."""
    return of.to(like.dtype).mean()
