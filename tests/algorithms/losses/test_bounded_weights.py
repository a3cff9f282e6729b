"""`cispo` and `tis`: every number is worked out by hand from their formulas."""

import math

import pytest

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient, metrics_of
from verbatim.algorithms.losses import LOSSES, cispo_loss, tis_loss
from verbatim.core.errors import ComponentError


@pytest.mark.parametrize(
    ("trainer", "inference", "advantage", "weight"),
    [
        (0.3, 0.2, 2.0, 1.5),  # inside
        (0.8, 0.1, 1.0, 6.0),  # w = 8, cut to 1 + 5
        (0.8, 0.1, -1.0, 6.0),  # whatever the sign
        (0.1, 0.8, 1.0, 0.125),  # no lower bound
        (0.1, 0.8, -1.0, 0.125),
        (0.8, 0.1, 0.0, 0.0),
    ],
)
def test_cispo_weighs_the_log_likelihood(trainer, inference, advantage, weight):
    found = loss_and_gradient(cispo_loss, inputs([trainer], [inference], [advantage]))
    slope = -weight * advantage
    assert found == (pytest.approx(slope * math.log(trainer), abs=1e-12), pytest.approx([slope], abs=1e-12))


def test_cispo_has_a_lower_bound_if_asked():
    # w = 0.125, at least 1 - 0.4 = 0.6.
    found = loss_and_gradient(cispo_loss, inputs([0.1], [0.8], [1.0]), eps_low=0.4)
    assert found[1] == pytest.approx([-0.6], abs=1e-12)


@pytest.mark.parametrize(
    ("trainer", "inference", "advantage", "weight"),
    [
        (0.3, 0.2, 2.0, 1.5),
        (0.6, 0.2, -1.0, 2.0),
        (0.6, 0.2, 1.0, 2.0),
        (0.1, 0.8, 1.0, 0.125),
        (0.6, 0.2, 0.0, 0.0),
    ],
)
def test_tis_weighs_the_log_likelihood(trainer, inference, advantage, weight):
    found = loss_and_gradient(tis_loss, inputs([trainer], [inference], [advantage]))
    slope = -weight * advantage
    assert found == (pytest.approx(slope * math.log(trainer), abs=1e-12), pytest.approx([slope], abs=1e-12))


def test_at_the_bound_the_gradient_is_the_bound():
    # The weight has no slope of its own, so there is no kink: 2 on both sides of it.
    for log_ratio in (math.log(2.0), math.log(2.0) + 1e-9):
        assert loss_and_gradient(tis_loss, log_inputs([log_ratio], [0.0], [1.0]))[1] == pytest.approx([-2.0], abs=1e-8)


def test_an_infinite_cap_is_no_cap():
    assert loss_and_gradient(tis_loss, inputs([0.9], [0.09], [1.0]), cap=math.inf)[1] == pytest.approx([-10.0])


def test_an_infinite_weight_is_no_reason_to_learn_from_an_advantage_of_zero():
    found = loss_and_gradient(tis_loss, log_inputs([-1.0], [-1001.0], [0.0]), cap=math.inf)
    assert found == (0.0, [0.0])


def test_metrics_count_what_is_cut_and_mask_nothing():
    data = inputs([0.8, 0.2, 0.05], [0.1, 0.2, 0.2], [1.0, 1.0, 1.0])  # w = 8, 1, 0.25
    cispo, tis = metrics_of(cispo_loss, data, eps_low=0.5), metrics_of(tis_loss, data)
    assert (cispo["clipped_low"], cispo["clipped_high"]) == pytest.approx((1 / 3, 1 / 3))
    assert (tis["clipped_low"], tis["clipped_high"]) == pytest.approx((0.0, 1 / 3))
    assert cispo["masked_by_loss"] == tis["masked_by_loss"] == 0
    assert cispo["importance_ratio_max"] == pytest.approx(8.0, abs=1e-12)


@pytest.mark.parametrize(
    ("loss", "parameter", "value"),
    [
        (cispo_loss, "eps_low", 1.1),
        (cispo_loss, "eps_high", -1.0),
        (tis_loss, "cap", 0.0),
    ],
)
def test_bounds_that_cannot_be_are_refused(loss, parameter, value):
    with pytest.raises(ComponentError, match=rf"trainer\.loss\.{parameter}: found {value}"):
        loss(inputs([0.5], [0.5], [1.0]), **{parameter: value})


@pytest.mark.parametrize("name", ["cispo", "tis"])
def test_they_are_sums_over_tokens(name):
    assert (LOSSES[name].level, LOSSES[name].normalizer) == ("token", "tokens")
