"""Every number here is worked out by hand from the formula in the docstring of `ppo_loss`."""

import math

import pytest

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient, metrics_of
from verbatim.algorithms.losses import LOSSES, ppo_loss
from verbatim.core.errors import ComponentError


@pytest.mark.parametrize(
    ("trainer", "inference", "advantage", "loss", "slope"),
    [
        (0.22, 0.2, 2.0, -2.2, -2.2),  # A > 0, w = 1.1 inside: -w A
        (0.5, 0.25, 1.0, -1.28, 0.0),  # A > 0, w = 2 above 1.28: clipped
        (0.1, 0.2, 1.0, -0.5, -0.5),  # A > 0, w = 0.5 below: min(0.5, 0.8) = 0.5, not clipped
        (0.18, 0.2, -2.0, 1.8, 1.8),  # A < 0, w = 0.9 inside
        (0.1, 0.2, -1.0, 0.8, 0.0),  # A < 0, w = 0.5 below 0.8: clipped
        (0.5, 0.25, -1.0, 2.0, 2.0),  # A < 0, w = 2 above: min(-2, -1.28) = -2, not clipped
        (0.5, 0.25, 0.0, 0.0, 0.0),  # A = 0
        (0.1, 0.2, 0.0, 0.0, 0.0),  # A = 0
    ],
)
def test_every_branch_of_the_clip(trainer, inference, advantage, loss, slope):
    found = loss_and_gradient(ppo_loss, inputs([trainer], [inference], [advantage]))
    assert found == (pytest.approx(loss, abs=1e-12), pytest.approx([slope], abs=1e-12))


@pytest.mark.parametrize(
    ("trainer", "advantage", "loss", "slope"),
    [
        (0.5, -1.0, 1.5, 0.0),  # w = 2 above c = 1.5: max(-2, -1.5) = -1.5
        (0.35, -1.0, 1.4, 1.4),  # w = 1.4 below c
        (0.1, -1.0, 0.8, 0.0),  # w = 0.4: the lower clip
        (0.5, 1.0, -1.28, 0.0),  # A > 0 has no second clip
    ],
)
def test_the_dual_clip_bounds_bad_tokens_only(trainer, advantage, loss, slope):
    found = loss_and_gradient(ppo_loss, inputs([trainer], [0.25], [advantage]), dual_clip=1.5)
    assert found == (pytest.approx(loss, abs=1e-12), pytest.approx([slope], abs=1e-12))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (math.log1p(0.28), 1.0, -1.28),
        (math.log(3.0), -1.0, 3.0),
        (0.0, 1.0, -1.0),
        (0.0, -1.0, 1.0),
    ],
)
def test_at_a_bound_the_gradient_is_that_of_the_unclipped_ratio(log_ratio, advantage, slope):
    data = log_inputs([log_ratio], [0.0], [advantage])
    assert loss_and_gradient(ppo_loss, data, dual_clip=3.0)[1] == pytest.approx([slope], abs=1e-12)


def test_an_upper_bound_of_one_is_the_kink_of_on_policy_tokens():
    # eps_high = 0: w = 1 is at the bound, and learns.
    found = loss_and_gradient(ppo_loss, log_inputs([-1.0], [-1.0], [1.0]), eps_high=0.0, eps_low=0.0)
    assert found == (pytest.approx(-1.0, abs=1e-12), pytest.approx([-1.0], abs=1e-12))


def test_metrics_count_the_clipped_tokens():
    # w = 2, 0.5, 2, 1; the first is clipped above, the second below, the third not: A < 0.
    data = inputs([0.4, 0.1, 0.4, 0.2], [0.2, 0.2, 0.2, 0.2], [1.0, -1.0, -1.0, 1.0])
    metrics = metrics_of(ppo_loss, data)
    assert metrics["clipped_high"] == 0.25 and metrics["clipped_low"] == 0.25 and metrics["masked_by_loss"] == 2
    assert metrics["importance_ratio_mean"] == pytest.approx(1.375, abs=1e-12)
    assert (metrics["importance_ratio_min"], metrics["importance_ratio_max"]) == pytest.approx((0.5, 2.0), abs=1e-12)
    # mean(w - log w - 1) = (2 * (1 - ln 2) + (ln 2 - 1/2)) / 4
    assert metrics["mismatch_kl"] == pytest.approx((1.5 - math.log(2)) / 4, abs=1e-12)
    assert metrics_of(ppo_loss, data, dual_clip=1.5)["clipped_high"] == 0.5


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("eps_low", -0.1, "greater than or equal to 0"),
        ("eps_low", 1.5, "less than or equal to 1"),
        ("eps_high", -0.1, "greater than or equal to 0"),
        ("dual_clip", 1.0, "greater than 1"),
        ("eps_high", math.nan, "a finite number"),
    ],
)
def test_bounds_that_cannot_be_are_refused(parameter, value, expected):
    with pytest.raises(ComponentError, match=rf"trainer\.loss\.{parameter}: found .*, expected {expected}"):
        ppo_loss(inputs([0.5], [0.5], [1.0]), **{parameter: value})


def test_it_is_a_sum_over_tokens():
    assert (LOSSES["ppo"].level, LOSSES["ppo"].normalizer) == ("token", "tokens")
    data = inputs([0.22, 0.5, 0.9], [0.2, 0.25, 0.1], [2.0, 1.0, 5.0], mask=[True, True, False])
    assert loss_and_gradient(ppo_loss, data)[0] == pytest.approx(-2.2 - 1.28, abs=1e-12)
