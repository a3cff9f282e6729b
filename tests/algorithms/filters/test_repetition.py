"""`repetition`: numbers worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim import Trajectory, Turn
from verbatim.algorithms.filters.repetition import Repetition
from verbatim.core.errors import ComponentError


def trajectory(*completions):
    turns = [Turn(prompt_ids=[1], completion_ids=ids, logprobs=[-1.0] * len(ids)) for ids in completions]
    return Trajectory(example_id="x", turns=turns)


def test_the_share_of_repeated_ngrams_over_all_turns():
    # 12 21 12 21 | 12: 5 bigrams, 2 + 1 distinct within their turns: 0.4.
    found = trajectory([1, 2, 1, 2, 1], [1, 2])
    assert Repetition(ngram=2, threshold=0.39)(found)
    assert not Repetition(ngram=2, threshold=0.4)(found)  # exactly the threshold is not above it


def test_a_call_that_recurs_in_every_turn_is_no_repetition():
    assert not Repetition(ngram=2, threshold=0.0)(trajectory(*[[5, 6, 7, 8]] * 10))


def test_one_token_over_and_over_is():
    # 20 tokens: 13 octograms, 1 distinct: 12/13 = 0.92.
    assert Repetition()(trajectory([3] * 20))
    # 10 tokens: 3, 1 distinct: 2/3 > 0.6. 9 tokens: 2, 1 distinct: 1/2.
    assert Repetition()(trajectory([3] * 10))
    assert not Repetition()(trajectory([3] * 9))


def test_untrained_turns_are_left_out():
    found = trajectory([3] * 20)
    assert not Repetition()(found.replace(turns=[found.turns[0].replace(trained=False)]))


def test_turns_shorter_than_an_ngram_have_none():
    assert not Repetition(threshold=0.0)(trajectory([3] * 7, [], [3] * 7))
    assert not Repetition(threshold=0.0)(trajectory())


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4), st.integers(1, 5), st.floats(0, 1))
def test_it_counts_as_plain_lists_do(completions, ngram, threshold):
    grams = [[tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)] for ids in completions]
    total, distinct = sum(map(len, grams)), sum(len(set(own)) for own in grams)
    expected = total > 0 and 1 - distinct / total > threshold
    assert Repetition(ngram=ngram, threshold=threshold)(trajectory(*completions)) == expected


@pytest.mark.parametrize(
    ("parameters", "explained"),
    [
        ({"threshold": 1.5}, "threshold = 1.5; expected a fraction from 0 to 1"),
        ({"ngram": 0}, "ngram = 0; expected at least 1"),
    ],
)
def test_parameters_that_cannot_be_are_refused(parameters, explained):
    with pytest.raises(ComponentError, match=f"repetition: {explained}"):
        Repetition(**parameters)


LONG = st.lists(st.sampled_from([0, 1, 2**21, 2**31 - 1]), min_size=100, max_size=120)


@given(
    completions=st.lists(LONG, min_size=4, max_size=5),
    ngram=st.integers(1, 9),
    threshold=st.sampled_from([0.0, 0.2, 0.4, 0.6, 1.0]),
)
@settings(max_examples=30)
def test_a_long_trajectory_is_counted_exactly(completions, ngram, threshold):
    """The quick look at the first ids of each n-gram never decides what an exact count would not."""
    grams = [{tuple(ids[at : at + ngram]) for at in range(len(ids) - ngram + 1)} for ids in completions]
    total = sum(max(0, len(ids) - ngram + 1) for ids in completions)
    flagged = total > 0 and 1 - sum(map(len, grams)) / total > threshold
    assert Repetition(ngram=ngram, threshold=threshold)(trajectory(*completions)) == flagged
