"""Advantages: reward minus the group's mean, and what a custom function may return."""

import math

import pytest

from verbatim import Group, Trajectory, Turn
from verbatim.credit import AdvantageInputs, AdvantageOutputs, assign_advantages
from verbatim.credit.default import default_advantage
from verbatim.errors import ComponentError


def group(*rewards, turns=1):
    rows = []
    for i, reward in enumerate(rewards):
        recorded = tuple(Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0]) for _ in range(turns))
        error = "environment: broke" if reward is None else None
        rows.append(Trajectory(example_id="x", sample_index=i, reward=reward, error=error, turns=recorded))
    return Group(group_id="g7", example_id="x", env="e", trajectories=rows)


def test_reward_minus_mean():
    outputs = default_advantage(AdvantageInputs(rollouts=group(1.0, 0.0, 0.0, 0.0).trajectories))
    assert outputs.advantages == [0.75, -0.25, -0.25, -0.25]


def test_a_group_of_one_gives_zero():
    assert default_advantage(AdvantageInputs(rollouts=group(0.7).trajectories)).advantages == [0.0]


def test_a_partial_group_is_credited_over_the_rollouts_without_an_error():
    credited = assign_advantages(group(1.0, None, 0.0), default_advantage)
    assert [t.advantage for t in credited.trajectories] == [0.5, None, -0.5]


def test_a_group_in_which_everything_failed_is_left_alone():
    failed = group(None, None)
    assert assign_advantages(failed, default_advantage) is failed


def test_one_list_per_rollout_becomes_the_turns_own_advantages():
    credited = assign_advantages(group(1.0, turns=2), lambda inputs: AdvantageOutputs(advantages=[[0.5, -2.0]]))
    assert [t.advantage for t in credited.trajectories[0].turns] == [0.5, -2.0]


def test_a_nan_advantage_fails_its_rollout_alone():
    credited = assign_advantages(group(1.0, 0.0), lambda inputs: AdvantageOutputs(advantages=[math.nan, 1.0]))
    assert [t.error is None for t in credited.trajectories] == [False, True]
    assert "nan" in credited.trajectories[0].error


def too_few(inputs):
    return AdvantageOutputs(advantages=[1.0])


def test_a_wrong_count_names_the_function_and_the_group():
    with pytest.raises(ComponentError, match=r"too_few returned 1 advantages for the 2 rollouts of group g7"):
        assign_advantages(group(1.0, 0.0), too_few)


def test_a_wrong_count_of_turns_names_the_rollout():
    with pytest.raises(ComponentError, match="3 advantages for the 1 turns of rollout 0"):
        assign_advantages(group(1.0), lambda inputs: AdvantageOutputs(advantages=[[1.0, 2.0, 3.0]]))
