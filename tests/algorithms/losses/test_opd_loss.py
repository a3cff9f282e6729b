"""Every number here is worked out by hand from the formula in the docstring of `opd_loss`."""

import math

import pytest

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient, metrics_of
from verbatim.algorithms.losses import LOSSES, opd_loss
from verbatim.core.errors import ComponentError

LOG2 = 0.6931471805599453


def test_the_teachers_log_ratio_is_the_advantage():
    # On-policy: w = 1; the loss is -(t - l), its slope the same: t - l has none.
    found = loss_and_gradient(opd_loss, inputs([0.25], [0.25], [5.0], teacher=[0.5]))
    assert found == (pytest.approx(-LOG2, abs=1e-12), pytest.approx([-LOG2], abs=1e-12))


def test_a_stale_token_is_weighed_and_held():
    # t - l = -ln 2, w = 0.5 / 0.25 = 2: 2 ln 2; KL term 0.1 (ln 2)^2, its slope 0.2 ln 2.
    found = loss_and_gradient(opd_loss, inputs([0.5], [0.25], [0.0], teacher=[0.25]), kl_tau=0.1)
    assert found[0] == pytest.approx(2 * LOG2 + 0.1 * LOG2**2, abs=1e-12)
    assert found[1] == pytest.approx([2 * LOG2 + 0.2 * LOG2], abs=1e-12)


def test_the_clamped_ratio_has_its_value_and_no_gradient():
    # w = 16 > 8, t - l = ln 2.
    found = loss_and_gradient(opd_loss, inputs([0.16], [0.01], [0.0], teacher=[0.32]), kl_tau=0.0)
    assert found == (pytest.approx(-8 * LOG2, abs=1e-12), [0.0])
    at = log_inputs([math.log(8.0)], [0.0], [0.0], teacher=[2.0])
    behind = LOG2 - math.log(8.0)
    assert loss_and_gradient(opd_loss, at, kl_tau=0.0)[1] == pytest.approx([-8 * behind], abs=1e-12)


def test_advantages_are_not_read():
    data = inputs([0.25], [0.25], [math.nan], teacher=[0.5])
    assert loss_and_gradient(opd_loss, data)[0] == pytest.approx(-LOG2, abs=1e-12)


def test_metrics_say_how_far_the_teacher_is():
    # l - t = ln 2 and -ln 4; w = 1 and 16.
    metrics = metrics_of(opd_loss, inputs([0.5, 0.16], [0.5, 0.01], [0.0, 0.0], teacher=[0.25, 0.64]))
    assert metrics["teacher_kl"] == pytest.approx(-LOG2 / 2, abs=1e-12)
    assert (metrics["clipped_high"], metrics["masked_by_loss"]) == (0.5, 0)


def test_without_a_teacher_it_is_refused():
    with pytest.raises(ComponentError, match="opd learns from a teacher, but the batch has no teacher_logprobs"):
        opd_loss(inputs([0.5], [0.5], [1.0]))


@pytest.mark.parametrize(("parameter", "value"), [("delta", 0.0), ("kl_tau", -1.0)])
def test_parameters_that_cannot_be_are_refused(parameter, value):
    with pytest.raises(ComponentError, match=rf"trainer\.loss\.{parameter}: found {value}"):
        opd_loss(inputs([0.5], [0.5], [1.0], teacher=[0.5]), **{parameter: value})


def test_it_is_a_sum_over_tokens():
    assert (LOSSES["opd"].level, LOSSES["opd"].normalizer) == ("token", "tokens")
