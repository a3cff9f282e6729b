"""The records refuse what cannot be, store a trajectory once, and read back id for id."""

import copy
import dataclasses
import doctest
import json
from enum import IntEnum
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import yaml

from verbatim import Group, RolloutIdentity, StopReason, Trajectory, Turn
from verbatim.core.errors import NoFlatList, RecordError
from verbatim.core.trajectories import trajectory as module
from verbatim.core.types import MicroBatch, Targets


def test_the_worked_examples_in_the_docstrings_hold():
    assert doctest.testmod(module) == (0, 6)


def test_a_turn_is_made_from_its_prompt_or_from_where_both_are_stored():
    turn = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
    again = Turn(path=turn.path, completion_ids=turn.completion_ids)
    assert (again.prompt_ids.tolist(), again.num_prompt_tokens) == ([1, 2], 2)
    assert dataclasses.replace(turn, reward=1.0).path is turn.path
    for wrong in ({}, {"prompt_ids": [1, 2], "path": turn.path}):
        with pytest.raises(TypeError, match="either prompt_ids or path"):
            Turn(completion_ids=[3], **wrong)
    for wrong in ([2], [1, 2, 4], [0, 1, 2, 3]):
        with pytest.raises(AssertionError, match="does not end with"):
            Turn(path=turn.path, completion_ids=wrong)
    changed = turn.replace(completion_ids=[7])
    assert (changed.prompt_ids.tolist(), changed.completion_ids.tolist(), changed.path.length) == ([1, 2], [7], 3)
    assert turn.replace(prompt_ids=[9]).prompt_ids.tolist() == [9]


def test_prompt_ids_read_back_exactly_and_cannot_be_written():
    turn = Turn(prompt_ids=[5, 6, 7], completion_ids=[8])
    assert turn.prompt_ids.tolist() == [5, 6, 7]
    assert turn.prompt_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        turn.prompt_ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        turn.reward = 1.0


def test_the_callers_array_stays_the_callers():
    ids = np.array([5, 6], dtype=np.int32)
    turn = Turn(prompt_ids=ids, completion_ids=ids)
    ids[0] = 99
    assert turn.prompt_ids.tolist() == [5, 6]
    assert turn.completion_ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: empty"),
        ({"prompt_ids": [1.5]}, "token ids are integers"),
        ({"prompt_ids": [[1]]}, "one list of token ids"),
        ({"completion_ids": [3, -1]}, "id -1 at position 1"),
        ({"completion_ids": [2**31]}, "id 2147483648 at position 0"),
        ({"logprobs": [-0.1]}, "1 for 2 completion ids"),
        ({"logprobs": [-0.1, float("nan")]}, "nan at position 1"),
        ({"logprobs": [-0.1, None]}, "logprobs"),
        ({"logprobs": [-0.1, float("-inf")]}, "-inf at position 1"),
        ({"logprobs": [0.5, -0.1]}, "0.5 at position 0"),
        ({"logprobs": [-0.1, 2e-4]}, "at position 1; expected a finite number <= 0"),
        ({"policy_versions": [0]}, "1 for 2 completion ids"),
        ({"policy_versions": [0, None]}, "policy_versions: expected integers"),
        ({"policy_versions": [0.5, 1]}, "policy_versions: expected integers"),
        ({"policy_versions": [1, 1.0]}, "policy_versions: expected integers"),
        ({"policy_versions": [True, True]}, "policy_versions: expected integers"),
        ({"policy_versions": [3, -2]}, "policy_versions: expected integers"),
        ({"policy_versions": [-2, -2]}, "policy_versions: expected integers"),
        ({"policy_versions": [2**31, 2**31]}, "policy_versions: expected integers"),
        ({"policy_versions": [[1], [1]]}, "policy_versions"),
        ({"policy_versions": np.array([2**40, 1])}, "policy_versions: expected integers"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_no_sampler_can_return_is_refused(fields, message):
    with pytest.raises(RecordError, match=message):
        Turn(**{"prompt_ids": [1], "completion_ids": [2, 3], **fields})


def test_a_missing_logprob_stays_missing_and_rounding_above_zero_becomes_zero():
    assert Turn(prompt_ids=[1], completion_ids=[2]).logprobs is None
    assert Turn(prompt_ids=[1], completion_ids=[2], logprobs=[9e-5]).logprobs.tolist() == [0.0]


def test_an_unbroken_trajectory_of_many_turns_is_stored_once():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, 64 * 10)
    turns = [Turn(prompt_ids=ids[: 10 * t + 6], completion_ids=ids[10 * t + 6 : 10 * t + 10]) for t in range(64)]
    trajectory = Trajectory(example_id="x", turns=turns)
    assert trajectory.num_stored_tokens == 640  # 64 full prompts would be 20,544
    for t, turn in enumerate(trajectory.turns):
        assert turn.prompt_ids.tolist() == ids[: 10 * t + 6].tolist()
    assert trajectory.num_breaks == 0


def test_a_turn_does_not_extend_one_that_ends_inside_of_its_completion():
    first = Turn(prompt_ids=[1, 2], completion_ids=[3])
    second = Turn(prompt_ids=[1, 2], completion_ids=[3, 4])
    trajectory = Trajectory(example_id="x", turns=(first, second))
    assert not trajectory.turns[1].extends(trajectory.turns[0])
    assert trajectory.num_breaks == 1


def test_a_broken_turn_still_shares_what_it_has_in_common():
    first = Turn(prompt_ids=[1, 2, 3], completion_ids=[4, 5])
    second = Turn(prompt_ids=[1, 2, 3, 9, 9], completion_ids=[6])
    trajectory = Trajectory(example_id="x", turns=(first, second))
    assert trajectory.num_breaks == 1
    assert trajectory.num_stored_tokens == 8  # 3 + 2, then only [9, 9] and [6]
    assert trajectory.turns[1].prompt_ids.tolist() == [1, 2, 3, 9, 9]


def test_a_prompt_that_stops_inside_the_completion_is_a_break():
    first = Turn(prompt_ids=[1], completion_ids=[2, 3])
    second = Turn(prompt_ids=[1, 2], completion_ids=[7])
    assert Trajectory(example_id="x", turns=(first, second)).num_breaks == 1


def test_replacing_a_field_keeps_ids_and_storage():
    turn = Trajectory(
        example_id="x",
        turns=(Turn(prompt_ids=[1], completion_ids=[2]), Turn(prompt_ids=[1, 2, 3], completion_ids=[4])),
    ).turns[1]
    changed = turn.replace(reward=1.0)
    assert changed.reward == 1.0
    assert changed.prompt_ids.tolist() == [1, 2, 3]
    assert changed.path is turn.path


def test_a_deep_copy_of_the_last_of_many_turns_shares_its_ids():
    ids = list(range(1, 5000))
    turns = [Turn(prompt_ids=ids[: 2 * t + 1], completion_ids=ids[2 * t + 1 : 2 * t + 2]) for t in range(2000)]
    last = Trajectory(example_id="x", turns=turns).turns[-1]
    assert copy.deepcopy(last).prompt_ids.tolist() == last.prompt_ids.tolist()


def test_the_mapping_view_has_the_documented_keys():
    turn = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
    trajectory = Trajectory(
        example_id="x", turns=(turn,), reward=1.0, stop_reason="stop", messages=({"role": "user", "content": "hi"},)
    )
    assert trajectory["turns"] == 1
    assert trajectory["reward"] == 1.0
    assert trajectory["stop_reason"] == "stop"
    assert trajectory["truncated"] is False
    assert trajectory["labels"] == [-100, -100, 3]
    assert trajectory["logprobs"] == [None, None, -0.5]
    assert trajectory["messages"] == [{"role": "user", "content": "hi"}]
    assert len(trajectory["samples"]) == 1
    assert set(dict(trajectory)) >= {"messages", "input_ids", "labels", "turns", "samples"}
    with pytest.raises(KeyError, match="nonsense"):
        trajectory["nonsense"]


def test_one_list_cannot_hold_two_contexts():
    broken = Trajectory(
        example_id="x",
        turns=(Turn(prompt_ids=[1], completion_ids=[2]), Turn(prompt_ids=[9], completion_ids=[3])),
    )
    for key in ("input_ids", "labels", "logprobs"):
        with pytest.raises(ValueError, match="samples"):
            broken[key]


def broken_trajectory(**fields):
    turns = (
        Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-0.5]),
        Turn(prompt_ids=[9, 8], completion_ids=[3], logprobs=[-0.25]),
    )
    return Trajectory(example_id="x", turns=turns, reward=1, **fields)


def test_everything_but_the_flat_lists_can_be_read_of_a_trajectory_with_a_break():
    broken = broken_trajectory()
    found = dict(broken)
    assert found == dict(broken.items()) and list(found) == list(broken.keys()) and len(broken) == len(found)
    assert {"messages", "turns", "stop_reason", "truncated", "samples", "reward"} <= found.keys()
    for key in ("input_ids", "labels", "logprobs"):
        assert key not in broken and key not in found
        assert (broken.get(key), broken.get(key, [])) == (None, [])
        with pytest.raises(NoFlatList, match=r"^trajectory 'x' has 1 break\(s\): one list cannot .*samples"):
            broken[key]
    assert (found["turns"], broken.get("nonsense"), "nonsense" in broken, "reward" in broken) == (2, None, False, True)


@pytest.mark.parametrize("broken", [False, True])
def test_the_mapping_view_is_json(broken):
    task = {"answer": (7,), "row": np.arange(2)}
    details = {
        "info": MappingProxyType({"score": np.float32(0.5), "seen": np.arange(2), "task": task}),
        "reward_parts": MappingProxyType({"exact": np.float64(1.0)}),
        "stop_reason": "stop",
        "advantage": np.float32(2),
        "messages": ({"role": "user", "content": "hi"},),
        "tools": ({"type": "function", "function": {"name": "add"}},),
    }
    trajectory = broken_trajectory(**details)
    if not broken:
        trajectory = trajectory.replace(turns=trajectory.turns[:1])
    found = json.loads(json.dumps(dict(trajectory), allow_nan=False))
    assert (
        found == dict(trajectory) | {"answer": [7], "row": [0, 1]} == yaml.safe_load(yaml.safe_dump(dict(trajectory)))
    )
    assert (found["reward"], found["reward_parts"], found["messages"]) == (1.0, {"exact": 1.0}, trajectory["messages"])
    assert found["info"] == {"score": 0.5, "seen": [0, 1], "task": {"answer": [7], "row": [0, 1]}}
    assert found["tools"] == [{"type": "function", "function": {"name": "add"}}]
    first = {"token_ids": [1, 2], "loss_mask": [False, True], "logprobs": [None, -0.5], "advantages": [0.0, 2.0]}
    assert {name: found["samples"][0][name] for name in first} == first
    assert len(found["samples"]) == 1 + broken


def test_texts_and_numbers_of_a_class_of_their_own_are_plain_in_the_mapping_view():
    class Level(IntEnum):
        HIGH = 3

    view = dict(Trajectory(example_id="x", stop_reason="max_turns", info={StopReason.STOP: Level.HIGH}))
    assert (type(view["stop_reason"]), view["stop_reason"]) == (str, "max_turns")
    assert [(type(key), key, type(value), value) for key, value in view["info"].items()] == [(str, "stop", int, 3)]


def test_without_a_turn_there_are_no_ids_to_give():
    empty = Trajectory(example_id="x", error="refused", stop_reason="api_error")
    assert not {"input_ids", "labels", "logprobs"} & dict(empty).keys() and empty["samples"] == []
    with pytest.raises(NoFlatList, match=r"^trajectory 'x' has no turn with token ids$"):
        empty["labels"]


def test_a_caller_s_field_is_read_by_its_name_unless_the_trajectory_has_one_of_that_name():
    trajectory = Trajectory(example_id="q7", reward=0.5, info={"task": {"answer": 42, "reward": "gold", "id": 7}})
    assert (trajectory["answer"], trajectory["reward"], trajectory["id"]) == (42, 0.5, "q7")
    assert trajectory.info["task"]["reward"] == "gold"
    assert "answer" in trajectory and list(trajectory).count("reward") == 1


def test_a_trajectory_keeps_the_identity_that_it_was_made_for():
    identity = RolloutIdentity(run_id="r", env="e", example_id="x", group_id="g", sample_index=3, seed=7)
    trajectory = Trajectory.of(identity, reward=1.0)
    assert (trajectory.identity, trajectory["run_id"], trajectory["sample_index"]) == (identity, "r", 3)
    assert trajectory.replace(seed=8).identity == dataclasses.replace(identity, seed=8)


def test_a_group_knows_which_of_its_rollouts_completed():
    good, bad = Trajectory(example_id="x", reward=1.0), Trajectory(example_id="x", error="environment: broke")
    assert Group(group_id="g", example_id="x", env="e", trajectories=[good, bad]).completed == (good,)


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.int64(1), np.array(1.0), Fraction(2, 2), True])
def test_a_reward_is_one_number_of_any_type(number):
    turn = Turn(prompt_ids=[1], completion_ids=[2], reward=number, advantage=number)
    trajectory = Trajectory(example_id="x", turns=(turn,), reward=number, advantage=number, reward_parts={"a": number})
    for value in (turn.reward, turn.advantage, trajectory.reward, trajectory.advantage):
        assert (type(value), value) == (float, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        [0.5, 1.0],
        [],
        (1.0,),
        np.array([1.0]),
        "1",
        {"a": 1.0},
        b"1",
        np.str_("1"),
        np.array(None),
        np.array("x"),
        np.datetime64("2020-01-01"),
        np.complex64(1),
        pytest.param(10**400, id="10**400"),
    ],
)
@pytest.mark.parametrize("name", ["reward", "advantage"])
def test_a_reward_or_an_advantage_that_is_not_one_number_is_refused_when_it_is_built(name, wrong):
    with pytest.raises(RecordError, match=f"{name}: .*; expected one number or None"):
        Turn(prompt_ids=[1], completion_ids=[2], **{name: wrong})
    with pytest.raises(RecordError, match=rf"{name}: .*expected one number or None; a turn's own goes into Turn"):
        Trajectory(example_id="x", **{name: wrong})
    with pytest.raises(RecordError, match=r"reward_parts\['exact'\]: .*; expected one number"):
        Trajectory(example_id="x", reward_parts={"exact": wrong})


@pytest.mark.parametrize("wrong", [[0.5], None, "exact"])
def test_reward_parts_that_have_no_names_are_refused(wrong):
    with pytest.raises(RecordError, match=r"reward_parts: .*; expected a mapping of names to numbers"):
        Trajectory(example_id="x", reward_parts=wrong)


def test_a_reward_that_is_not_finite_stays_on_its_trajectory_to_be_counted():
    assert Trajectory(example_id="x", reward=float("nan")).bad_reward == "reward: nan is not finite"
    assert Trajectory(example_id="x").bad_reward == "reward: missing"
    assert Trajectory(example_id="x", reward=0).bad_reward is None


def test_only_a_natural_stop_is_not_truncated():
    assert [r.value for r in StopReason if not r.truncated] == ["stop"]


def test_row_lengths_are_read_from_positions():
    integers = ("source_positions", "target_ids", "chunk_ids", "trajectories", "offsets")
    targets = Targets(
        **{n: np.zeros(0, np.int32) for n in integers},
        **{n: np.zeros(0, np.float32) for n in ("temperatures", "inference_logprobs", "advantages")},
    )
    batch = MicroBatch(
        input_ids=np.array([7, 8, 9]),
        position_ids=np.array([0, 1, 0]),
        starts=np.array([0, 1, 2]),
        ends=np.array([2, 2, 3]),
        targets=targets,
        trajectory_ids=(),
        trajectory_lengths=np.zeros(0, np.int32),
    )
    assert batch.row_lengths.tolist() == [2, 1]
