import pytest

from verbatim.config.schema import OptimConfig
from verbatim.trainer.optim import learning_rate


def factors(total, **kwargs):
    return [learning_rate(OptimConfig(lr=1.0, **kwargs), step, total) for step in range(total + 1)]


def test_constant_is_constant():
    assert factors(3) == [1.0, 1.0, 1.0, 1.0]


def test_warmup_rises_in_a_straight_line_and_never_wastes_a_step_at_zero():
    assert factors(4, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_reaches_its_end_as_the_last_step_is_done():
    assert factors(6, schedule="linear", warmup_steps=1) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_linear_ends_at_the_ratio():
    assert factors(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle():
    # cos(pi / 4) = 0.7071: (1 + 0.7071) / 2 = 0.8536
    assert factors(4, schedule="cosine") == pytest.approx([1.0, 0.85355339, 0.5, 0.14644661, 0.0])


def test_cosine_ends_at_the_ratio():
    # 0.1 + 0.9 * [1, 1/2, 0]
    assert factors(2, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([1.0, 0.55, 0.1])


def test_a_run_shorter_than_its_warmup_stays_in_it():
    assert factors(2, schedule="cosine", warmup_steps=9)[:2] == pytest.approx([0.1, 0.2])


def test_one_step_is_taken_at_the_peak():
    assert factors(1, schedule="cosine")[0] == 1.0


def test_more_steps_than_planned_are_a_broken_invariant():
    with pytest.raises(AssertionError):
        learning_rate(OptimConfig(), 5, 4)
