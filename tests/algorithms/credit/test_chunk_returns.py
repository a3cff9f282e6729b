"""`chunk_returns`: numbers worked out by hand."""

import pytest

from algorithms.credit.groups import advantages, rollout, turn
from verbatim.algorithms.credit.chunk_returns import TURN_REWARDS_SUM, chunk_returns_advantage
from verbatim.core.errors import ComponentError


def of(*rollouts, **parameters):
    return advantages(chunk_returns_advantage, *rollouts, **parameters)


def test_a_terminal_reward_is_discounted_by_turns():
    assert of(rollout(8.0, turn(), turn(), turn(), turn()), gamma=0.5) == [[1.0, 2.0, 4.0, 8.0]]


def test_the_default_discount():
    (found,) = of(rollout(1.0, turn(), turn(), turn()))
    assert found == pytest.approx([0.9025, 0.95, 1.0], rel=1e-12)


def test_turn_rewards_count_from_their_turn_on():
    # G_3 = 1 + 4 = 5, G_2 = 0 + 2.5, G_1 = 2 + 1.25.
    assert of(rollout(4.0, turn(reward=2.0), turn(), turn(reward=1.0)), gamma=0.5) == [[3.25, 2.5, 5.0]]


def test_where_the_turns_rewards_sum_to_the_reward_it_is_not_counted_twice():
    summed = rollout(3.0, turn(reward=2.0), turn(), turn(reward=1.0), info={TURN_REWARDS_SUM: True})
    assert of(summed, gamma=0.5) == [[2.25, 0.5, 1.0]]


def test_turns_that_sampled_nothing_are_not_counted():
    # K = 2, not 4: the discount is one step, and the last turn that spoke has the reward.
    assert of(rollout(1.0, turn(), turn(0), turn(), turn(0)), gamma=0.5) == [[0.5, 0.0, 1.0, 0.0]]


def test_untrained_turns_are_passed_over():
    # The discount is one step, the last trained turn has the reward, and the mean is over the trained turns.
    user = turn().replace(trained=False)
    assert of(rollout(1.0, turn(), user, turn(), user), gamma=0.5) == [[0.5, 0.0, 1.0, 0.0]]
    found = of(rollout(1.0, turn(), user), rollout(0.0, turn(), user), gamma=0.5, baseline="group")
    assert found == [[0.5, 0.0], [-0.5, 0.0]]


def test_the_own_reward_of_an_untrained_turn_goes_to_the_trained_turns_before_it():
    # G_2 = 1 + 0.5 * 4 = 3 (the last trained turn, with the trajectory's reward), G_1 = 0.5 * (2 + 3).
    user, later = (turn(reward=r).replace(trained=False) for r in (2.0, 4.0))
    assert of(rollout(1.0, turn(), user, turn(), later), gamma=0.5) == [[2.5, 0.0, 3.0, 0.0]]
    # A tool's reward for a turn that sampled nothing.
    assert of(rollout(0.0, turn(), turn(0, reward=2.0)), gamma=0.5) == [[1.0, 0.0]]


def test_where_rewards_sum_to_the_reward_those_of_untrained_turns_are_not_the_last_ones():
    # The reward 6 is 2 + 4: nothing is left over for the last turn.
    user = turn(reward=4.0).replace(trained=False)
    summed = rollout(6.0, turn(), user, turn(reward=2.0), info={TURN_REWARDS_SUM: True})
    assert of(summed, gamma=0.5) == [[3.0, 0.0, 2.0]]


def test_sub_agents_turns_are_turns():
    turns = [turn(), turn().replace(agent="sub/1"), turn()]
    assert of(rollout(4.0, *turns), gamma=0.5) == [[1.0, 2.0, 4.0]]


def test_without_a_baseline_a_failure_teaches_nothing():
    assert of(rollout(0.0, turn(), turn()), rollout(1.0), gamma=0.5) == [[0.0, 0.0], [1.0]]


def test_the_groups_baseline_is_over_trajectories():
    # Means 0.75 (two turns) and 0: baseline 0.375, not the mean over three turns.
    found = of(rollout(1.0, turn(), turn()), rollout(0.0), gamma=0.5, baseline="group")
    assert found == [[0.125, 0.625], [-0.375]]


def test_an_episode_that_said_nothing_is_in_no_baseline():
    silent = rollout(1.0, turn(0))
    assert of(silent, rollout(0.5), gamma=0.5, baseline="group") == [[0.0], [0.0]]
    assert of(silent, baseline="group") == [[0.0]]
    assert of(rollout(1.0).replace(turns=()), baseline="group") == [[]]


@pytest.mark.parametrize(
    ("parameters", "explained"),
    [
        ({"gamma": 1.5}, "gamma = 1.5; expected a discount from 0 to 1"),
        ({"gamma": -0.1}, "gamma = -0.1"),
        ({"baseline": "mean"}, 'baseline = \'mean\'; expected "none" or "group"'),
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters, explained):
    with pytest.raises(ComponentError, match=explained):
        of(rollout(1.0), **parameters)
