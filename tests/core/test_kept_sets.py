"""The ids among which each token was drawn are recorded with it, and lead to its target."""

import json

import numpy as np
import pytest

from verbatim import Trajectory, Turn, build_samples
from verbatim.core.errors import RecordError
from verbatim.core.records.kept import KeptSets
from verbatim.core.trajectory_json import plain, trajectory_from_json, trajectory_to_json
from verbatim.core.types import TrainingSample
from verbatim.rollouts.recorder import Recorder
from verbatim.trainer.packing import pack_rows, pack_tree


def lists(kept: KeptSets) -> list[list[int]]:
    return [kept[place].tolist() for place in range(len(kept))]


def test_sets_are_stored_one_after_the_other_and_ascending():
    kept = KeptSets.of([[7, 3], [], [7]])
    assert (kept.ids.tolist(), kept.offsets.tolist(), len(kept)) == ([3, 7, 7], [0, 2, 2, 3], 3)
    assert kept.ids.dtype == np.int32 and not kept.ids.flags.writeable
    assert lists(kept.first(2)) == [[3, 7], []]
    assert lists(kept.picked(np.array([2, 0, 0]))) == [[7], [3, 7], [3, 7]]
    assert lists(kept.spread(np.array([1, 2, 4]), 6)) == [[], [3, 7], [], [], [7], []]
    assert lists(KeptSets.joined([None, kept, None], [1, 3, 2])) == [[], [3, 7], [], [7], [], []]
    assert KeptSets.joined([None, None], [1, 3]) is None


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[3]], "kept_sets: 1 for 2 completion ids"),
        ([[3], [4, 5]], "the 2 ids kept at position 1 do not include the id 9"),
        ([[3, 3], [9]], "each id of a set once"),
        ([[3, -1], [9]], "kept_sets: ids from -1"),
        ([[3, 2**31], [9]], "kept_sets: ids from 3 to 2147483648"),
        ([[3.5], [9]], "expected a list of token ids"),
        ([None, [9]], "expected a list of token ids"),
        (5, "expected a list of token ids"),
        (KeptSets.of_counts(np.array([9, 3, 9], np.int32), [2, 1]), "ascending"),
    ],
)
def test_a_turn_refuses_sets_that_cannot_be(kept, message):
    with pytest.raises(RecordError, match=message):
        Turn(prompt_ids=[1], completion_ids=[3, 9], kept_sets=kept)


def test_an_id_outside_the_vocabulary_is_refused():
    recorder = Recorder(10)
    recorder.record(prompt_ids=[1], completion_ids=[3], kept_sets=[[3, 9]])
    with pytest.raises(RecordError, match="kept_sets: an id is outside the vocabulary of 10 ids"):
        recorder.record(prompt_ids=[1], completion_ids=[3], kept_sets=[[3, 10]])


FIRST = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25], "kept_sets": [[3, 5], [4]]}
SECOND = {"prompt_ids": [1, 2, 3, 4, 9], "completion_ids": [6], "logprobs": [-1.0]}
THIRD = {"prompt_ids": [1, 2, 3, 4, 9, 6, 9], "completion_ids": [7], "logprobs": [-1.0], "kept_sets": [[0, 7, 8]]}


def trajectory(*turns: dict, **fields) -> Trajectory:
    return Trajectory(example_id="x", turns=[Turn(**turn) for turn in turns], advantage=1.0, reward=1.0, **fields)


def test_json_has_the_sets_of_the_turns_that_have_any():
    record = json.loads(json.dumps(plain(trajectory_to_json(trajectory(FIRST, SECOND)))))
    assert record["turns"][0]["kept_sets"] == [[3, 5], [4]] and "kept_sets" not in record["turns"][1]
    first, second = trajectory_from_json(record).turns
    assert lists(first.kept_sets) == [[3, 5], [4]] and second.kept_sets is None


def test_samples_and_targets_have_the_set_of_each_trained_token():
    (sample,) = build_samples(trajectory(FIRST, SECOND, THIRD, trajectory_id="a"))
    assert lists(sample.kept_sets) == [[], [], [3, 5], [4], [], [], [], [0, 7, 8]]
    other = build_samples(trajectory(SECOND, trajectory_id="b"))[0]
    assert other.kept_sets is None
    for pack in (pack_rows, pack_tree):
        (micro_batch,) = pack([sample, other], micro_batch_tokens=99, keep_whole=False)
        targets = micro_batch.targets
        places = zip(targets.trajectories.tolist(), targets.offsets.tolist(), strict=True)
        found = dict(zip(places, lists(targets.kept_sets), strict=True))
        a, b = (micro_batch.trajectory_ids.index(name) for name in "ab")
        assert found == {(a, 2): [3, 5], (a, 3): [4], (a, 5): [], (a, 7): [0, 7, 8], (b, 5): []}
        assert micro_batch.num_tokens == (14 if pack is pack_rows else 8)  # a set is a target's: prefixes are shared


def test_a_batch_without_sets_has_none():
    sample = build_samples(trajectory(SECOND))[0]
    assert isinstance(sample, TrainingSample)
    assert pack_rows([sample], micro_batch_tokens=99, keep_whole=False)[0].targets.kept_sets is None
