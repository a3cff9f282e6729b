"""A recorder keeps every id that it was given, stores each once, and refuses what cannot be."""

import numpy as np
import pytest

from verbatim.core.errors import RecordError
from verbatim.rollouts import Recorder


def ids(*values):
    return np.array(values, dtype=np.int32)


def record(recorder, prompt, completion, **fields):
    return recorder.record(prompt_ids=prompt, completion_ids=completion, logprobs=[-1.0] * len(completion), **fields)


def new_ids(recorder, index):
    """What storing a turn added."""
    turns = recorder.turns
    before = {turn.path.segment for turn in turns[:index]}
    segment = turns[index].path.segment
    return segment.ids.tolist() if segment not in before else []


def test_a_prompt_that_extends_the_turn_before_is_stored_as_what_is_new():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    record(recorder, ids(1, 2, 3, 4, 5), ids(6))
    assert new_ids(recorder, 1) == [4, 5, 6]
    assert recorder.turns[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert recorder.turns[1].completion_ids.tolist() == [6]


def test_a_prompt_that_breaks_with_the_turn_before_keeps_its_exact_ids():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    record(recorder, ids(1, 2, 9, 4), ids(6))
    assert new_ids(recorder, 1) == [9, 4, 6]
    assert recorder.turns[1].prompt_ids.tolist() == [1, 2, 9, 4]


def test_a_prompt_that_returns_to_an_earlier_branch_is_stored_as_what_it_adds_to_that():
    recorder = Recorder(100)
    record(recorder, ids(1, 2), ids(3))
    record(recorder, ids(50, 51), ids(52))
    record(recorder, ids(1, 2, 3, 60), ids(4))
    assert new_ids(recorder, 2) == [60, 4]


def test_lists_are_taken_as_well_as_arrays():
    recorder = Recorder(10)
    record(recorder, [1, 2], [3])
    record(recorder, np.array([1, 2, 3, 4], dtype=np.int64), (5,))
    assert recorder.turns[1].prompt_ids.tolist() == [1, 2, 3, 4]


def test_the_callers_arrays_stay_the_callers():
    recorder, prompt, completion = Recorder(10), ids(1, 2), ids(3)
    record(recorder, prompt, completion)
    prompt[0], completion[0] = 9, 9
    assert recorder.turns[0].prompt_ids.tolist() == [1, 2]
    assert recorder.turns[0].completion_ids.tolist() == [3]


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_vocabulary_is_refused_in_the_new_part_too(bad):
    recorder = Recorder(10, trajectory_id="train-3-1")
    record(recorder, ids(1, 2), ids(3))
    with pytest.raises(ValueError, match=f"trajectory 'train-3-1', turn 1: prompt_ids: id {bad} at position 4"):
        record(recorder, ids(1, 2, 3, 4, bad), ids(6))
    with pytest.raises(ValueError, match=f"trajectory 'train-3-1', turn 1: completion_ids: id {bad} at position 1"):
        record(recorder, ids(1, 2, 3, 4), ids(6, bad))
    assert len(recorder.turns) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-1.0]}, "turn 1: logprobs: 1 for 2 completion ids"),
        ({"logprobs": [-1.0, float("nan")]}, "turn 1: logprobs: nan at position 1"),
        ({"policy_versions": [0, 0, 0]}, "turn 1: policy_versions: 3 for 2 completion ids"),
        ({"prompt_ids": []}, "turn 1: prompt_ids: empty"),
        ({"prompt_ids": [0.5]}, "turn 1: prompt_ids: token ids are integers"),
    ],
)
def test_what_no_sampler_can_return_names_trajectory_and_turn(fields, message):
    recorder = Recorder(10, trajectory_id="t")
    record(recorder, ids(1), ids(2))
    with pytest.raises(ValueError, match=f"trajectory 't', {message}"):
        recorder.record(**{"prompt_ids": ids(1, 2, 3), "completion_ids": ids(4, 5), **fields})


def test_a_prompt_that_is_said_to_be_bridged_is_verified():
    recorder = Recorder(10, trajectory_id="t")
    record(recorder, ids(1, 2), ids(3, 4))
    assert record(recorder, ids(1, 2, 3, 4, 5), ids(6), extends=0) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 3], "the prompt ends at position 3; turn 0 has 4 tokens"),
        ([1, 2, 9, 4, 5], "the prompt differs from turn 0 at position 2"),
    ],
)
def test_a_bridge_that_does_not_extend_its_turn_is_refused(prompt, message):
    recorder = Recorder(10, trajectory_id="t")
    record(recorder, ids(1, 2), ids(3, 4))
    with pytest.raises(ValueError, match=f"trajectory 't', turn 1: prompt_ids: should extend turn 0, but {message}"):
        record(recorder, ids(*prompt), ids(6), extends=0)


def test_nothing_is_recorded_after_the_episode_has_ended():
    sampled, dropped = [], []
    recorder = Recorder(10, sampled.append, dropped.append, trajectory_id="t")
    recorder.count(1)
    record(recorder, ids(1, 2), ids(3))
    recorder.close()
    with pytest.raises(RecordError, match=r"trajectory 't', turn 1: .* after the episode had ended"):
        recorder.count(2)
    with pytest.raises(RecordError, match=r"trajectory 't', turn 1: .* after the episode had ended"):
        record(recorder, ids(1, 2, 3), ids(4))
    assert recorder.late is not None
    # Counted, then refused: the sampler drew it, and no trajectory will have it.
    assert (sampled, dropped, recorder.num_sampled_tokens, len(recorder.turns)) == ([1, 2], [{"error": 2}], 1, 1)
    recorder.count_cancelled(3)
    assert (sampled, dropped[1:]) == ([1, 2, 3], [{"error": 3}])


def test_amending_a_turn_makes_a_new_one_of_the_same_ids():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    before = recorder.turns[0]
    recorder.amend(0, reward=0.5)
    after = recorder.turns[0]
    assert (before.reward, after.reward) == (None, 0.5)
    assert after.path is before.path and after.completion_ids is before.completion_ids
