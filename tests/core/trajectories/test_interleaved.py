"""Interleaving: every sampled token once, in the context it was sampled in, or counted."""

import doctest
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import verbatim.core.trajectories.samples
from drawn import drawn, is_found
from verbatim import Trajectory, Turn, build_samples
from verbatim.core.trajectories import build
from verbatim.core.trajectories.extension import OpenSamples


def turn(prompt, completion, **fields):
    fields.setdefault("logprobs", [-0.5] * len(completion))
    return Turn(prompt_ids=prompt, completion_ids=completion, **fields)


def trajectory(*turns, **fields):
    return Trajectory(example_id="x", turns=turns, **fields)


def trained(sample):
    return [int(i) for i, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]


def test_the_worked_example_in_the_docstring_holds():
    assert doctest.testmod(verbatim.core.trajectories.samples).failed == 0


def test_three_turns_that_extend_each_other_are_one_sample():
    # U1=[1], A1=[11], U2=[2], A2=[12], U3=[3], A3=[13]
    samples = build_samples(
        trajectory(turn([1], [11]), turn([1, 11, 2], [12]), turn([1, 11, 2, 12, 3], [13]), advantage=0.5)
    )
    assert len(samples) == 1
    (s,) = samples
    assert s.token_ids.tolist() == [1, 11, 2, 12, 3, 13]
    assert s.loss_mask.tolist() == [False, True, False, True, False, True]
    assert s.chunk_ids.tolist() == [-1, 0, -1, 1, -1, 2]
    assert s.advantages.tolist() == [0, 0.5, 0, 0.5, 0, 0.5]
    np.testing.assert_array_equal(s.logprobs, np.float32([np.nan, -0.5, np.nan, -0.5, np.nan, -0.5]))


def test_five_turns_with_a_break_at_the_fourth_are_two_samples():
    history_changed = [1, 2, 3, 90]  # the thinking of earlier turns is gone
    samples = build_samples(
        trajectory(
            turn([1], [11]),
            turn([1, 11, 2], [12]),
            turn([1, 11, 2, 12, 3], [13]),
            turn(history_changed, [14]),
            turn([*history_changed, 14, 5], [15]),
        )
    )
    assert [s.token_ids.tolist() for s in samples] == [[1, 11, 2, 12, 3, 13], [1, 2, 3, 90, 14, 5, 15]]
    assert [trained(s) for s in samples] == [[11, 12, 13], [14, 15]]


def test_a_main_agent_that_delegates_gives_one_sample_for_each_agent():
    samples = build_samples(
        trajectory(
            turn([1, 2], [3], agent="main"),
            turn([50, 51], [52], agent="sub/1"),
            turn([50, 51, 52, 53], [54], agent="sub/1"),
            turn([1, 2, 3, 60], [4], agent="main"),
        )
    )
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 60, 4], [50, 51, 52, 53, 54]]
    assert [trained(s) for s in samples] == [[3, 4], [52, 54]]
    assert samples[0].chunk_ids.tolist() == [-1, -1, 0, -1, 3]


def test_the_longest_exact_prefix_wins_over_a_shorter_one():
    # [1, 2] is open from the first turn, [1, 2, 3] from the second; the third extends the longer.
    samples = build_samples(trajectory(turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4], [5])))
    assert [trained(s) for s in samples] == [[2], [2, 3, 5]]


def test_a_shared_completion_is_trained_once_when_two_turns_branch_from_it():
    samples = build_samples(trajectory(turn([1], [2]), turn([1, 2, 7], [8]), turn([1, 2, 9], [10])))
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 7, 8], [1, 2, 9, 10]]
    assert [trained(s) for s in samples] == [[2, 8], [10]]


def test_a_completion_right_after_another_stays_its_own_chunk():
    (s,) = build_samples(trajectory(turn([1], [2, 3]), turn([1, 2, 3], [4])))
    assert s.chunk_ids.tolist() == [-1, 0, 0, 1]


def test_a_turn_without_logprobs_is_context_only_and_counted():
    built = build(trajectory(turn([1], [2, 3], logprobs=None), turn([1, 2, 3, 4], [5])))
    assert built.dropped == {"missing_logprobs": 2}
    assert [trained(s) for s in built.samples] == [[5]]
    assert built.samples[0].token_ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("needs_logprobs", [True, False])
@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_an_untrained_turn_is_context_only_and_counted(strategy, needs_logprobs):
    turns = (turn([1], [2, 3], trained=False), turn([1, 2, 3, 4], [5]), turn([9], [8, 7, 6], trained=False))
    built = build(trajectory(*turns), strategy=strategy, needs_logprobs=needs_logprobs)
    assert built.dropped == {"untrained": 5}
    assert [s.token_ids.tolist() for s in built.samples] == [[1, 2, 3, 4, 5]]
    assert [trained(s) for s in built.samples] == [[5]]


def test_an_untrained_turn_counts_once_also_where_it_is_too_long_or_has_no_logprobs():
    turns = (turn([1], [2, 3], trained=False, logprobs=None), turn([1, 4, 5], [6, 7, 8], trained=False))
    assert build(trajectory(*turns), max_length=4).dropped == {"untrained": 5}
    failed = trajectory(*turns).replace(error="environment: raised")
    assert build(failed).dropped == {"error": 5}


def test_an_untrained_turn_is_no_label_of_the_flat_lists():
    t = trajectory(turn([1], [2]), turn([1, 2, 3], [4], trained=False), turn([1, 2, 3, 4], [5]))
    assert t["input_ids"] == [1, 2, 3, 4, 5]
    assert t["labels"] == [-100, 2, -100, -100, 5]


def test_recorded_text_without_logprobs_is_trained_in_supervised_mode():
    built = build(trajectory(turn([1], [2, 3], logprobs=None)), needs_logprobs=False)
    assert [trained(s) for s in built.samples] == [[2, 3]]
    assert not built.dropped


def test_cuts_for_length_fall_on_a_turn_boundary_and_are_counted():
    built = build(trajectory(turn([1], [2, 3]), turn([1, 2, 3, 4], [5, 6])), max_length=5)
    assert [s.token_ids.tolist() for s in built.samples] == [[1, 2, 3]]
    assert built.dropped == {"over_length": 2}


def test_a_single_turn_that_is_too_long_by_itself_is_dropped_and_counted():
    built = build(trajectory(turn([1], [2, 3])), max_length=2)
    assert built.samples == []
    assert built.dropped == {"over_length": 2}


@pytest.mark.parametrize("empty", [trajectory(), trajectory(turn([1, 2], []))])
def test_an_episode_without_a_sampled_token_gives_no_samples(empty):
    built = build(empty)
    assert (built.samples, built.dropped) == ([], {})


def test_an_aborted_generation_between_two_turns_changes_nothing():
    samples = build_samples(trajectory(turn([1], [2]), turn([1, 2, 3], []), turn([1, 2, 3], [4])))
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4]]


def test_a_turns_own_advantage_wins_over_the_trajectorys():
    (s,) = build_samples(trajectory(turn([1], [2], advantage=-1.0), turn([1, 2], [3]), advantage=0.25))
    assert s.advantages.tolist() == [0, -1.0, 0.25]


def test_versions_and_temperatures_stay_with_their_tokens():
    (s,) = build_samples(trajectory(turn([1], [2, 3], policy_versions=[4, 5], temperature=0.7)))
    assert s.policy_versions.tolist() == [-1, 4, 5]
    assert s.temperatures.tolist() == pytest.approx([1.0, 0.7, 0.7])


def test_an_unknown_strategy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'zigzag'.*interleaved"):
        build_samples(trajectory(), strategy="zigzag")


def test_at_a_break_the_closest_sample_and_the_first_difference_are_named():
    turns = trajectory(turn([1, 2], [3]), turn([1, 2, 8], [9]), turn([1, 2, 8, 7], [4])).turns
    opened = OpenSamples()
    opened.open(turns[0].path)
    opened.open(turns[1].path)
    found = opened.find(turns[2])
    assert (found.sample, found.closest, found.shared) == (None, 1, 3)


@st.composite
def episodes(draw):
    """Turns that extend, branch from, or forget earlier contexts, over a tiny alphabet so that prefixes collide."""
    contexts, turns = [[]], []
    for _ in range(draw(st.integers(0, 8))):
        base = draw(st.sampled_from(contexts))
        cut = draw(st.integers(0, len(base))) if draw(st.booleans()) else len(base)
        prompt = base[:cut] + draw(st.lists(st.integers(0, 2), min_size=0 if cut else 1, max_size=3))
        completion = draw(st.lists(st.integers(0, 2), max_size=3))
        known = draw(st.booleans()) or not completion
        turns.append(turn(prompt, completion, logprobs=[-0.5] * len(completion) if known else None))
        contexts.append(prompt + completion)
    return turns


@given(episodes(), st.one_of(st.none(), st.integers(1, 12)))
@drawn("tokens of trajectories", 60, 10000)
def test_every_sampled_token_is_trained_once_in_its_own_context_or_counted(turns, max_length):
    check_tokens(turns, build(trajectory(*turns), max_length=max_length), max_length)


def test_a_drop_that_is_not_counted_is_found():
    """The campaign can fail."""

    def case(turns):
        built = build(trajectory(*turns), max_length=4)
        check_tokens(turns, SimpleNamespace(samples=built.samples, dropped={}), 4)

    assert is_found(case, episodes(), cases=40)


def check_tokens(turns, built, max_length):
    """Each sampled token is trained once in its context, or counted."""
    seen = []
    for sample in built.samples:
        assert max_length is None or len(sample) <= max_length
        for i in np.flatnonzero(sample.loss_mask):
            index = int(sample.chunk_ids[i])
            place = int(i) - int(np.flatnonzero(sample.chunk_ids == index)[0])
            origin = turns[index]
            context = [*origin.prompt_ids.tolist(), *origin.completion_ids.tolist()[:place]]
            assert sample.token_ids[:i].tolist() == context
            assert sample.token_ids[i] == origin.completion_ids[place]
            seen.append((index, place))
    assert len(seen) == len(set(seen))
    assert len(seen) + sum(built.dropped.values()) == sum(len(t.completion_ids) for t in turns)
