"""`default`, `normalized` and `rloo`: numbers worked out by hand."""

import pytest

from algorithms.credit.groups import advantages, group
from verbatim.algorithms.credit import ADVANTAGES
from verbatim.algorithms.credit.baselines import default_advantage, normalized_advantage, rloo_advantage
from verbatim.core.errors import ComponentError


def of(function, *rewards, **parameters):
    return advantages(function, *group(*rewards).trajectories, **parameters)


def test_default_is_the_reward_minus_the_mean():
    assert of(default_advantage, 1.0, 0.0, 0.0, 0.0) == [0.75, -0.25, -0.25, -0.25]


def test_normalized_divides_by_the_populations_deviation():
    # Mean 2, deviations 1 and -1, variance 1.
    assert of(normalized_advantage, 3.0, 1.0) == pytest.approx([1.0, -1.0], rel=1e-7)
    # Mean 1/4; variance (9/16 + 3/16) / 4 = 3/16, std sqrt(3)/4.
    found = of(normalized_advantage, 1.0, 0.0, 0.0, 0.0, eps=0.0)
    assert found == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], rel=1e-12)


def test_normalized_adds_its_eps_to_the_deviation():
    assert of(normalized_advantage, 3.0, 1.0, eps=1.0) == pytest.approx([0.5, -0.5], rel=1e-12)


def test_rloo_compares_with_the_mean_of_the_others():
    # 4 - (1 + 2)/2, 1 - (4 + 2)/2, 2 - (4 + 1)/2.
    assert of(rloo_advantage, 4.0, 1.0, 2.0) == pytest.approx([2.5, -2.0, -0.5], rel=1e-12)
    assert of(rloo_advantage, 1.0, 0.0, 0.0) == pytest.approx([1.0, -0.5, -0.5], rel=1e-12)


@pytest.mark.parametrize("name", ["default", "normalized", "rloo", "gigpo"])
def test_a_group_of_one_gives_zero(name):
    (found,) = of(ADVANTAGES[name], 0.7)
    assert found in (0.0, [0.0])


@pytest.mark.parametrize("eps", [-1.0, float("nan")])
def test_a_negative_eps_is_refused(eps):
    with pytest.raises(ComponentError, match=r"normalized: eps = .*; expected a number >= 0"):
        of(normalized_advantage, 1.0, 0.0, eps=eps)
