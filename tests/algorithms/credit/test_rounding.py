"""Rewards that differ by rounding alone are equal, for every advantage, filter, pool and verdict."""

from functools import partial

import pytest

from algorithms.credit.groups import advantages, group, group_of, rollout, turn
from verbatim import Trajectory
from verbatim.algorithms.credit import ADVANTAGES
from verbatim.algorithms.credit.length_penalty import with_relative_bonus
from verbatim.algorithms.curriculum import PoolRules, flatness
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.config.schema import CriterionConfig
from verbatim.core.records.equality import are_equal, deviation
from verbatim.run.evaluation.intervals import mean_interval, unpaired_mean
from verbatim.run.orchestrator.eval_progress import improves

NEARLY = [[0.7 + 0.1, 0.8], [0.1 + 0.2, 0.3, 0.3, 0.3], [0.5, 0.5 + 1e-8], [3e6, 3e6 + 1]]
"""In the first two, a sum misses the number that it is meant to be by a bit."""


def flat(found):
    return [value for one in found for value in (one if isinstance(one, list) else [one])]


@pytest.mark.parametrize("rewards", NEARLY)
@pytest.mark.parametrize("name", ["default", "normalized", "rloo", "gigpo"])
def test_rounding_is_no_advantage(name, rewards):
    assert len(set(rewards)) > 1
    rollouts = [rollout(reward, turn(state="a")) for reward in rewards]
    assert set(flat(advantages(ADVANTAGES[name], *rollouts))) == {0.0}


@pytest.mark.parametrize("rewards", NEARLY)
def test_rounding_is_no_advantage_over_the_groups_mean_return(rewards):
    found = advantages(ADVANTAGES["chunk_returns"], *map(rollout, rewards), gamma=1.0, baseline="group")
    assert set(flat(found)) == {0.0}


def test_a_difference_above_rounding_is_one():
    # Mean 0.500005, deviation 0.000005; eps is 1e-8, 1/500 of it.
    found = advantages(ADVANTAGES["normalized"], *map(rollout, [0.5, 0.50001]))
    assert found == pytest.approx([-1 / 1.002, 1 / 1.002], rel=1e-6)


@pytest.mark.parametrize("rewards", NEARLY)
def test_a_group_that_differs_by_rounding_is_flat(rewards):
    assert flatness(group(*rewards)) in ("flat", "easy")
    assert flatness(group_of(rollout(1.0 - 1e-16), rollout(1.0))) == "easy"
    assert flatness(group_of(rollout(0.1 + 0.2 - 0.3), rollout(0.0))) == "hard"
    assert flatness(group_of(rollout(0.5, agent_rewards={"a": 0.3}), rollout(0.5, agent_rewards={"a": 0.1 + 0.2}))) == (
        "flat"
    )


def test_an_advantage_of_rounding_is_zero_for_the_filter():
    assert ZeroAdvantage()(Trajectory(example_id="x", advantage=5e-17, turns=(turn(),)))
    assert not ZeroAdvantage()(Trajectory(example_id="x", advantage=1e-5, turns=(turn(),)))


def test_a_mean_that_misses_a_threshold_by_rounding_reaches_it():
    assert sum([0.1] * 3) / 3 > 0.1
    assert PoolRules(hard_threshold=0.1).pool_of(sum([0.1] * 3) / 3) == "hard"
    assert sum([0.1] * 10) < 1
    assert PoolRules(easy_threshold=1.0).pool_of(sum([0.1] * 10)) == "easy"


def test_the_best_rollouts_of_a_length_bonus_are_those_that_are_equal_to_the_best():
    # Costs 2 and 6 are 4 on average: the first earns half as much again, though its sum is a bit less.
    assert with_relative_bonus([0.3, 0.1 + 0.2, 0.0], [2, 6, 1]) == pytest.approx([0.45, 0.3, 0.0])


def test_rounding_is_no_improvement_of_an_evaluation():
    better = partial(improves, CriterionConfig(metric="reward/mean"))
    assert not better(0.1 + 0.2, 0.3)
    assert not better(0.8, 0.7, by=0.1)  # 0.8 - 0.7 is 0.10000000000000009
    assert better(0.31, 0.3)


def test_values_that_differ_by_rounding_have_no_deviation_and_no_interval():
    assert deviation([0.1 + 0.2, 0.3]) == 0
    assert not mean_interval({"a": [0.1 + 0.2], "b": [0.3]}).has_interval
    assert not unpaired_mean({"a": [0.1 + 0.2], "b": [0.3]}, {"a": [0.4], "b": [0.4]}).has_interval


def test_nan_and_infinity_are_equal_to_nothing():
    nan, inf = float("nan"), float("inf")
    assert not any(map(are_equal, ([nan, nan], [inf, inf], [inf, 0.0], [0.5, nan])))
