"""`gibberish`: numbers worked out by hand."""

import pytest

from verbatim import Trajectory, Turn
from verbatim.algorithms.filters.gibberish import Gibberish
from verbatim.core.errors import ComponentError


def trajectory(*logprobs):
    turns = [Turn(prompt_ids=[1], completion_ids=[2] * (1 if p is None else len(p)), logprobs=p) for p in logprobs]
    return Trajectory(example_id="x", turns=turns)


def test_the_mean_is_over_all_sampled_tokens_not_over_turns():
    # (-6 - 1 - 8) / 3 = -5; the mean of the turns' means would be -5.75.
    found = trajectory([-6.0, -1.0], [-8.0])
    assert Gibberish()(found)
    assert not Gibberish(threshold=-5.5)(found)


def test_a_mean_of_exactly_the_threshold_is_not_flagged():
    assert not Gibberish(threshold=-5.0)(trajectory([-6.0, -1.0], [-8.0]))


def test_one_bad_token_is_no_gibberish():
    assert not Gibberish()(trajectory([-0.1, -20.0, -0.1, -0.1, -0.1, -0.1]))


def test_turns_without_logprobs_are_left_out():
    assert Gibberish()(trajectory([-5.0], None))
    assert not Gibberish()(trajectory([-3.0], None))
    assert not Gibberish()(trajectory(None))


def test_untrained_turns_are_left_out():
    found = trajectory([-5.0], [-0.1, -0.1, -0.1])
    assert not Gibberish()(found)
    assert Gibberish()(found.replace(turns=(found.turns[0], found.turns[1].replace(trained=False))))


def test_an_episode_that_sampled_nothing_is_not_flagged():
    assert not Gibberish()(trajectory([]))
    assert not Gibberish()(trajectory())


@pytest.mark.parametrize("threshold", [0.5, float("nan")])
def test_a_threshold_that_would_flag_everything_is_refused(threshold):
    with pytest.raises(ComponentError, match=r"gibberish: threshold = .*; expected a logprob <= 0"):
        Gibberish(threshold=threshold)
