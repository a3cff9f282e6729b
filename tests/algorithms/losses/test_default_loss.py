"""Every number here is worked out by hand from the formula in the docstring of `default_loss`."""

import math

import pytest
import torch

from algorithms.losses.loss_inputs import inputs, loss_and_gradient
from verbatim.algorithms.losses import LOSSES, LossInputs, default_loss
from verbatim.core.errors import ComponentError


def value_and_gradient(data, **parameters):
    return loss_and_gradient(default_loss, data, **parameters)


def test_a_kept_token_is_minus_ratio_times_advantage():
    # w = 0.3 / 0.2 = 1.5, d = 0.1 <= 0.2: kept. pg = -1.5 * 2 = -3; d pg / d l = -w A = -3.
    loss, gradient = value_and_gradient(inputs([0.3], [0.2], [2.0]), kl_tau=0.0)
    assert loss == pytest.approx(-3.0, abs=1e-12)
    assert gradient == pytest.approx([-3.0], abs=1e-12)


def test_negative_advantage_pushes_the_token_down():
    # w = 0.3 / 0.4 = 0.75, d = -0.1 >= -0.2: kept. pg = +0.75 * 2.
    loss, gradient = value_and_gradient(inputs([0.3], [0.4], [-2.0]), kl_tau=0.0)
    assert loss == pytest.approx(1.5, abs=1e-12)
    assert gradient == pytest.approx([1.5], abs=1e-12)


def test_kl_term_is_the_squared_log_ratio():
    # w = 1/2: kl = 0.1 * (ln 2)^2, its gradient 0.1 * 2 * ln(1/2); pg has no weight.
    loss, gradient = value_and_gradient(inputs([0.1], [0.2], [1.0]), adv_tau=0.0, kl_tau=0.1)
    assert loss == pytest.approx(0.1 * 0.4804530139182014, abs=1e-12)
    assert gradient == pytest.approx([-0.2 * 0.6931471805599453], abs=1e-12)


def test_tokens_are_added_up_not_averaged():
    loss, _ = value_and_gradient(inputs([0.2, 0.2, 0.2], [0.2, 0.2, 0.2], [1.0, 2.0, -0.5]))
    assert loss == pytest.approx(-2.5, abs=1e-12)


def test_a_good_token_that_rose_too_far_keeps_only_its_kl_term():
    # d = 0.75 - 0.25 = 0.5 > 0.2, A > 0: dropped. kl = 1e-3 * (ln 3)^2 is left.
    loss, gradient = value_and_gradient(inputs([0.75], [0.25], [1.0]))
    log3 = 1.0986122886681098
    assert loss == pytest.approx(1e-3 * log3**2, abs=1e-12)
    assert gradient == pytest.approx([2e-3 * log3], abs=1e-12)


def test_a_bad_token_that_fell_too_far_keeps_only_its_kl_term():
    # d = 0.25 - 0.75 = -0.5 < -0.2, A <= 0: dropped.
    loss, gradient = value_and_gradient(inputs([0.25], [0.75], [-1.0]))
    log3 = 1.0986122886681098
    assert loss == pytest.approx(1e-3 * log3**2, abs=1e-12)
    assert gradient == pytest.approx([-2e-3 * log3], abs=1e-12)


def test_moves_in_the_wrong_direction_are_never_dropped():
    # A good token that fell by 0.5 and a bad one that rose by 0.5: w = 1/3 and 3, both kept.
    loss, _ = value_and_gradient(inputs([0.25, 0.75], [0.75, 0.25], [1.0, -1.0]), kl_tau=0.0)
    assert loss == pytest.approx(-1 / 3 + 3, abs=1e-12)


@pytest.mark.parametrize(("trainer", "inference", "advantage"), [(0.5, 0.25, 1.0), (0.25, 0.5, -1.0)])
def test_a_move_of_exactly_the_threshold_is_kept(trainer, inference, advantage):
    data = inputs([trainer], [inference], [advantage])
    threshold = abs(data.trainer_logprobs.exp() - data.inference_logprobs.exp()).item()
    at = default_loss(data, dppo_mask_low=threshold, dppo_mask_high=threshold)
    below = math.nextafter(threshold, 0)
    under = default_loss(data, dppo_mask_low=below, dppo_mask_high=below)
    assert (at.metrics["masked_by_loss"].item(), under.metrics["masked_by_loss"].item()) == (0, 1)


def test_low_and_high_thresholds_are_not_confused():
    data = inputs([0.5, 0.2], [0.2, 0.5], [1.0, -1.0])  # d = +0.3 and -0.3
    high = default_loss(data, dppo_mask_high=0.25, dppo_mask_low=0.35).metrics
    low = default_loss(data, dppo_mask_high=0.35, dppo_mask_low=0.25).metrics
    assert (high["dppo_dropped_high"].item(), high["dppo_dropped_low"].item()) == (0.5, 0.0)
    assert (low["dppo_dropped_high"].item(), low["dppo_dropped_low"].item()) == (0.0, 0.5)


def test_a_zero_advantage_counts_with_the_low_side():
    metrics = default_loss(inputs([0.1, 0.9], [0.9, 0.1], [0.0, 0.0])).metrics
    assert (metrics["dppo_dropped_low"].item(), metrics["dppo_dropped_high"].item()) == (0.5, 0.0)


def test_the_clamped_ratio_has_its_value_and_no_gradient():
    # w = 0.16 / 0.01 = 16 > 8, d = 0.15: kept. pg = -8, gradient 0.
    loss, gradient = value_and_gradient(inputs([0.16], [0.01], [1.0]), kl_tau=0.0)
    assert loss == pytest.approx(-8.0, abs=1e-12)
    assert gradient == [0.0]


def test_delta_of_infinity_does_not_clamp():
    loss, gradient = value_and_gradient(inputs([0.16], [0.01], [1.0]), kl_tau=0.0, delta=math.inf)
    assert loss == pytest.approx(-16.0, abs=1e-12)
    assert gradient == pytest.approx([-16.0], abs=1e-12)


def test_delta_that_is_not_positive_is_refused():
    with pytest.raises(ComponentError, match=r"trainer\.loss\.delta: found 0\.0, expected greater than 0"):
        default_loss(inputs([0.5], [0.5], [1.0]), delta=0.0)


def test_tokens_outside_the_mask_do_nothing_even_if_they_are_nan():
    nan = float("nan")
    data = inputs([0.3, nan, 1.0], [0.2, nan, 1.0], [2.0, nan, 5.0], mask=[True, False, False])
    outputs = default_loss(data, kl_tau=0.0)
    (gradient,) = torch.autograd.grad(outputs.loss, data.trainer_logprobs)
    assert outputs.loss.item() == pytest.approx(-3.0, abs=1e-12)
    assert gradient.tolist() == pytest.approx([-3.0, 0.0, 0.0], abs=1e-12)
    assert outputs.metrics["importance_ratio_mean"].item() == pytest.approx(1.5, abs=1e-12)


@pytest.mark.parametrize("delta", [8.0, math.inf])
def test_a_ratio_beyond_float32_leaves_finite_gradients(delta):
    # l = -0.01 against m = -200: exp(l - m) is infinite in float32. A > 0: dropped; A < 0: clamped.
    trainer = torch.tensor([-0.01, -0.01], requires_grad=True)
    mask = torch.tensor([True, math.isfinite(delta)])  # without a clamp the second gradient truly is infinite
    data = LossInputs(trainer, torch.tensor([-200.0, -200.0]), None, torch.tensor([1.0, -1.0]), mask)
    (gradient,) = torch.autograd.grad(default_loss(data, delta=delta, kl_tau=0.0).loss, trainer)
    assert gradient.tolist() == [0.0, 0.0]


def test_metrics_are_those_worked_by_hand():
    # w = 2 and 1/2: mean(w - log w - 1) = (2 - ln 2 - 1 + 1/2 + ln 2 - 1) / 2 = 0.25
    metrics = default_loss(inputs([0.2, 0.1], [0.1, 0.2], [1.0, 1.0])).metrics
    assert metrics["mismatch_kl"].item() == pytest.approx(0.25, abs=1e-12)
    assert metrics["importance_ratio_mean"].item() == pytest.approx(1.25, abs=1e-12)
    assert metrics["importance_ratio_min"].item() == pytest.approx(0.5, abs=1e-12)
    assert metrics["importance_ratio_max"].item() == pytest.approx(2.0, abs=1e-12)
    assert metrics["masked_by_loss"].item() == 0
    assert not any(value.requires_grad for value in metrics.values())


LOG2, LOG3 = 0.6931471805599453, 1.0986122886681098


@pytest.mark.parametrize(
    ("trainer", "inference", "ratio", "advantage", "policy", "slope", "dropped"),
    [
        (0.3, 0.2, 1.5, 2.0, -3.0, -3.0, 0),  # A > 0, rose by 0.1: kept
        (0.75, 0.25, 3.0, 1.0, 0.0, 0.0, 1),  # A > 0, rose by 0.5: dropped
        (0.25, 0.75, 1 / 3, 1.0, -1 / 3, -1 / 3, 0),  # A > 0, fell by 0.5: kept
        (0.16, 0.01, 16.0, 1.0, -8.0, 0.0, 0),  # A > 0, rose by 0.15: kept and clamped
        (0.32, 0.02, 16.0, 1.0, 0.0, 0.0, 1),  # A > 0, rose by 0.3: dropped, whatever the clamp
        (0.3, 0.4, 0.75, -2.0, 1.5, 1.5, 0),  # A < 0, fell by 0.1: kept
        (0.25, 0.75, 1 / 3, -1.0, 0.0, 0.0, 1),  # A < 0, fell by 0.5: dropped
        (0.75, 0.25, 3.0, -1.0, 3.0, 3.0, 0),  # A < 0, rose by 0.5: kept
        (0.16, 0.01, 16.0, -1.0, 8.0, 0.0, 0),  # A < 0, rose by 0.15: kept and clamped
        (0.32, 0.02, 16.0, -1.0, 8.0, 0.0, 0),  # A < 0, rose by 0.3: kept and clamped
        (0.3, 0.4, 0.75, 0.0, 0.0, 0.0, 0),  # A = 0, fell by 0.1
        (0.25, 0.75, 1 / 3, 0.0, 0.0, 0.0, 1),  # A = 0, fell by 0.5: counts as dropped
        (0.75, 0.25, 3.0, 0.0, 0.0, 0.0, 0),  # A = 0, rose by 0.5
        (0.16, 0.01, 16.0, 0.0, 0.0, 0.0, 0),  # A = 0, above the clamp
    ],
)
def test_every_branch_of_the_mask_and_the_clamp(trainer, inference, ratio, advantage, policy, slope, dropped):
    """Each with its KL term beside it: 0.01 log(w)^2, whose slope is 0.02 log(w)."""
    data = inputs([trainer], [inference], [advantage])
    loss, gradient = value_and_gradient(data, kl_tau=0.01)
    assert loss == pytest.approx(policy + 0.01 * math.log(ratio) ** 2, abs=1e-12)
    assert gradient == pytest.approx([slope + 0.02 * math.log(ratio)], abs=1e-12)
    assert default_loss(data).metrics["masked_by_loss"].item() == dropped


def test_the_example_of_its_docstring():
    loss, _ = value_and_gradient(inputs([0.5], [0.25], [1.0]))
    assert loss == pytest.approx(1e-3 * LOG2**2, abs=1e-12)


def test_a_ratio_of_exactly_delta_still_has_its_gradient():
    # l - m = ln 8 to the last bit: the clamp is not passed, so both value and slope are -8 A.
    data = LossInputs(
        torch.tensor([math.log(8.0)], dtype=torch.float64, requires_grad=True),
        torch.zeros(1, dtype=torch.float64),
        None,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([True]),
    )
    loss, gradient = value_and_gradient(data, kl_tau=0.0)
    assert (loss, gradient) == (pytest.approx(8.0, abs=1e-12), pytest.approx([8.0], abs=1e-12))


# ---- with a teacher


def test_a_teacher_adds_its_log_ratio_to_the_advantage():
    # A = 0.5 * 2 + 2 * ln(0.6 / 0.3) = 1 + 2 ln 2; w = 0.3 / 0.2 = 1.5, d = 0.1: kept. No slope through t - l.
    data = inputs([0.3], [0.2], [2.0], teacher=[0.6])
    loss, gradient = value_and_gradient(data, adv_tau=0.5, teacher_tau=2.0, kl_tau=0.0)
    assert loss == pytest.approx(-1.5 * (1 + 2 * LOG2), abs=1e-12)
    assert gradient == pytest.approx([-1.5 * (1 + 2 * LOG2)], abs=1e-12)


def test_without_the_advantage_a_teacher_is_distillation():
    # t - l = ln(0.15 / 0.3) = -ln 2 whatever A is: the token is pushed down at w = 1.5.
    data = inputs([0.3], [0.2], [7.0], teacher=[0.15])
    loss, gradient = value_and_gradient(data, adv_tau=0.0, teacher_tau=1.0, kl_tau=0.0)
    assert (loss, gradient) == (pytest.approx(1.5 * LOG2, abs=1e-12), pytest.approx([1.5 * LOG2], abs=1e-12))
    assert default_loss(data, teacher_tau=1.0).metrics["teacher_kl"].item() == pytest.approx(LOG2, abs=1e-12)


def test_the_mask_asks_for_the_sign_of_the_whole_advantage():
    # d = 0.5 > 0.2 and A_rl = 1, but A = 1 + 2 ln(0.25 / 0.75) = 1 - 2 ln 3 < 0: kept.
    data = inputs([0.75], [0.25], [1.0], teacher=[0.25])
    assert default_loss(data).metrics["masked_by_loss"].item() == 1
    loss, _ = value_and_gradient(data, teacher_tau=2.0, kl_tau=0.0)
    assert loss == pytest.approx(-3 * (1 - 2 * LOG3), abs=1e-12)


def test_a_teacher_that_has_no_weight_is_not_read():
    data = inputs([0.3], [0.2], [2.0], teacher=[math.nan])
    assert default_loss(data, kl_tau=0.0).loss.item() == pytest.approx(-3.0, abs=1e-12)


def test_a_weight_without_a_teacher_is_refused():
    with pytest.raises(ComponentError, match="teacher_tau > 0 learns from a teacher, but the batch has no teacher"):
        default_loss(inputs([0.3], [0.2], [2.0]), teacher_tau=0.1)


def test_the_table_binds_defaults_and_level():
    entry = LOSSES["default"]
    data = inputs([0.3], [0.2], [2.0])
    assert (entry.level, entry.normalizer, entry.needs_inference_logprobs) == ("token", "tokens", True)
    assert entry(data).loss.item() == default_loss(data).loss.item()
