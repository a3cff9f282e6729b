"""Every number here is worked out by hand from the formula in the docstring of `gspo_loss`."""

import math

import pytest

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient, metrics_of
from verbatim.algorithms.losses import LOSSES, gspo_loss
from verbatim.core.errors import ComponentError


def test_one_ratio_for_the_trajectory_is_the_geometric_mean():
    # w = 4 and 1: s = 2, above the bound but A < 0. Loss s, and each slope s / 2.
    found = loss_and_gradient(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [-1.0, -1.0]))
    assert found == (pytest.approx(2.0, abs=1e-12), pytest.approx([1.0, 1.0], abs=1e-12))


def test_a_good_trajectory_above_the_bound_learns_nothing():
    found = loss_and_gradient(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [1.0, 1.0]))
    assert found == (pytest.approx(-1.0004, abs=1e-12), [0.0, 0.0])


def test_a_bad_trajectory_below_the_bound_learns_nothing():
    # w = 1/4 and 1: s = 1/2.
    found = loss_and_gradient(gspo_loss, inputs([0.1, 0.1], [0.4, 0.1], [-1.0, -1.0]))
    assert found == (pytest.approx(0.9997, abs=1e-12), [0.0, 0.0])


def test_a_good_trajectory_below_the_bound_learns():
    found = loss_and_gradient(gspo_loss, inputs([0.1, 0.1], [0.4, 0.1], [1.0, 1.0]))
    assert found == (pytest.approx(-0.5, abs=1e-12), pytest.approx([-0.25, -0.25], abs=1e-12))


def test_inside_the_bounds_it_is_the_ratio():
    # Mean log ratio (0.0008 - 0.0004) / 2 = 0.0002 < log 1.0004. Loss -s A, slope -s A / 2.
    data = log_inputs([-0.9992, -1.0004], [-1.0, -1.0], [3.0, 3.0])
    s = math.exp(0.0002)
    found = loss_and_gradient(gspo_loss, data)
    assert found == (pytest.approx(-3 * s, abs=1e-12), pytest.approx([-1.5 * s] * 2, abs=1e-12))


def test_at_the_bound_the_gradient_is_that_of_the_unclipped_ratio():
    data = log_inputs([math.log1p(0.25)], [0.0], [1.0])
    assert loss_and_gradient(gspo_loss, data, eps_high=0.25)[1] == pytest.approx([-1.25], abs=1e-12)


def test_turns_with_advantages_of_their_own_share_the_ratio():
    # s = 2 with A = 1 (clipped at 1.0004) and A = -1 (not): loss (-1.0004 + 2) / 2. Slopes come from the second alone,
    # d(s / 2) / dl = s / 4 at both tokens, because both are in s.
    found = loss_and_gradient(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [1.0, -1.0]))
    assert found == (pytest.approx(0.4998, abs=1e-12), pytest.approx([0.5, 0.5], abs=1e-12))


def test_tokens_outside_the_mask_are_in_no_mean():
    nan = math.nan
    data = inputs([0.4, nan, 0.1, 1.0], [0.1, nan, 0.1, 1.0], [-1.0, nan, -1.0, 9.0], mask=[True, False, True, False])
    found = loss_and_gradient(gspo_loss, data)
    assert found == (pytest.approx(2.0, abs=1e-12), pytest.approx([1.0, 0.0, 1.0, 0.0], abs=1e-12))


def test_metrics_are_the_trajectorys():
    metrics = metrics_of(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [1.0, -1.0]))
    assert metrics == pytest.approx(
        {
            "sequence_ratio_mean": 2.0,
            "sequence_ratio_min": 2.0,
            "sequence_ratio_max": 2.0,
            "clipped_low": 0.0,
            "clipped_high": 0.5,
            "masked_by_loss": 0,
        },
        abs=1e-12,
    )
    assert metrics_of(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [1.0, 0.0]))["masked_by_loss"] == 1
    assert metrics_of(gspo_loss, inputs([0.4, 0.1], [0.1, 0.1], [1.0, 1.0]))["masked_by_loss"] == 2


def test_it_is_divided_by_trajectories():
    assert (LOSSES["gspo"].level, LOSSES["gspo"].normalizer) == ("sequence", "trajectories")


@pytest.mark.parametrize("parameter", ["eps_low", "eps_high"])
def test_a_negative_bound_is_refused(parameter):
    with pytest.raises(ComponentError, match=rf"trainer\.loss\.{parameter}: found -1"):
        gspo_loss(inputs([0.5], [0.5], [1.0]), **{parameter: -1.0})
