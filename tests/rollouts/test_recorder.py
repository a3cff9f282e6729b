import numpy as np
import pytest

from verbatim.errors import RecordError
from verbatim.rollouts import Recorder
from verbatim.types import TokenPath, Turn


def ids(*values):
    return np.array(values, dtype=np.int32)


def record(recorder, prompt, completion):
    path = recorder.path(prompt)
    recorder.record(Turn(prompt_ids=path, completion_ids=completion, logprobs=[-1.0] * len(completion)))
    return path


def test_a_prompt_that_extends_the_turn_before_is_stored_as_what_is_new():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    path = record(recorder, ids(1, 2, 3, 4, 5), ids(6))
    assert isinstance(path, TokenPath) and path.tail.tolist() == [4, 5]
    assert recorder.turns[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]


def test_a_prompt_that_breaks_with_the_turn_before_keeps_its_exact_ids():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    assert record(recorder, ids(1, 2, 9, 4), ids(6)).tolist() == [1, 2, 9, 4]
    assert recorder.turns[1].prompt_ids.tolist() == [1, 2, 9, 4]
    assert recorder.turns[1].prompt_path.shared == 2


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_vocabulary_is_refused_in_the_new_part_too(bad):
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    with pytest.raises(RecordError, match=f"turn 1, prompt: id {bad} at position 1"):
        record(recorder, ids(1, 2, 3, 4, bad), ids(6))


def test_amending_a_turn_makes_a_new_one_of_the_same_ids():
    recorder = Recorder(10)
    record(recorder, ids(1, 2), ids(3))
    before = recorder.turns[0]
    recorder.amend(0, reward=0.5)
    after = recorder.turns[0]
    assert (before.reward, after.reward) == (None, 0.5)
    assert after.prompt_path is before.prompt_path and after.completion_ids is before.completion_ids
