"""`gigpo`: numbers worked out by hand."""

import pytest

from algorithms.credit.groups import advantages, rollout, turn
from verbatim.algorithms.credit.gigpo import gigpo_advantage
from verbatim.core.errors import ComponentError


def of(*rollouts, **parameters):
    return advantages(gigpo_advantage, *rollouts, **{"gamma": 0.5, "scale": "none", **parameters})


def two():
    """Both act in state a; the first goes on to b."""
    return rollout(1.0, turn(state="a"), turn(state="b")), rollout(0.0, turn(state="a"))


def test_episodes_against_the_group_and_turns_against_their_state():
    # Returns 0.5, 1 | 0. Episodes +-0.5; in a: 0.5 and 0 around 0.25; b is seen once.
    assert of(*two()) == [[0.75, 0.5], [-0.75]]


def test_each_comparison_is_scaled_by_its_own_deviation():
    # Episodes: +-0.5 over 0.5; state a: +-0.25 over 0.25.
    assert of(*two(), scale="std") == [[2.0, 1.0], [-2.0]]


def test_the_weight_of_turns():
    assert of(*two(), w_step=2.0) == [[1.0, 0.5], [-1.0]]
    assert of(*two(), w_step=0.0) == [[0.5, 0.5], [-0.5]]


def test_a_state_that_is_visited_again_is_compared_with_itself():
    # Returns in a: 0.25, 0.5 (of the first) and 0; their mean is 0.25. b is seen once.
    first = rollout(1.0, turn(state="a"), turn(state="a"), turn(state="b"))
    assert of(first, rollout(0.0, turn(state="a"))) == [[0.5, 0.75, 0.5], [-0.75]]


def test_turns_without_a_state_are_compared_with_nothing():
    assert of(rollout(1.0, turn(), turn()), rollout(0.0, turn())) == [[0.5, 0.5], [-0.5]]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_state_in_which_all_did_equally_well_adds_nothing(scale):
    # One turn each from the end: both return 1 from state a. The third makes episodes differ: std of (1, 1, 0).
    same = rollout(1.0, turn(state="a")), rollout(1.0, turn(state="a")), rollout(0.0, turn(state="b"))
    found = of(*same, scale=scale)
    std = 2**0.5 / 3 if scale == "std" else 1.0
    assert found == [[pytest.approx(1 / 3 / std)], [pytest.approx(1 / 3 / std)], [pytest.approx(-2 / 3 / std)]]


def test_where_every_episode_earned_the_same_turns_still_differ():
    # Two ways to the same reward: from a, in one turn (1) or two (0.5).
    found = of(rollout(1.0, turn(state="a")), rollout(1.0, turn(state="a"), turn(state="b")))
    assert found == [[0.25], [-0.25, 0.0]]


def test_a_turn_that_sampled_nothing_gets_zero_and_is_in_no_state():
    first = rollout(1.0, turn(0, state="a"), turn(state="a"))
    assert of(first, rollout(0.0, turn(state="a"))) == [[0.0, 1.0], [-1.0]]


@pytest.mark.parametrize(
    ("parameters", "explained"),
    [
        ({"gamma": 2.0}, "gamma = 2.0"),
        ({"w_step": -1.0}, "w_step = -1.0; expected a number >= 0"),
        ({"scale": "max"}, 'scale = \'max\'; expected "std" or "none"'),
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters, explained):
    with pytest.raises(ComponentError, match=explained):
        of(*two(), **parameters)
