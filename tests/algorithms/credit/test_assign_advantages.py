"""What may come back from an advantage function, how it reaches the trajectories, and what never does."""

import math

import numpy as np
import pytest

from algorithms.credit.groups import group, group_of, rollout, turn
from verbatim.algorithms.credit import ADVANTAGES, AdvantageOutputs, assign_advantages, try_advantage
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.credit.chunk_returns import TURN_REWARDS_SUM, chunk_returns_advantage
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.errors import ComponentError


def returning(advantages):
    return lambda inputs: AdvantageOutputs(advantages=advantages)


def values(credited):
    """One number for each rollout: its own advantage, or its first turn's."""
    return [t.advantage if t.advantage is not None else t.turns[0].advantage for t in credited.trajectories]


def test_a_partial_group_is_credited_over_the_rollouts_without_an_error():
    credited = assign_advantages(group(1.0, None, 0.0), default_advantage)
    assert [t.advantage for t in credited.trajectories] == [0.5, None, -0.5]


def test_a_group_in_which_everything_failed_is_left_alone():
    failed = group(None, None)
    assert assign_advantages(failed, default_advantage) is failed


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_leaves_broken_rollouts_out_of_its_baseline(name):
    """With and without the one that broke, the others get the same."""
    partial = values(assign_advantages(group(1.0, None, 0.0, 0.5), ADVANTAGES[name]))
    whole = values(assign_advantages(group(1.0, 0.0, 0.5), ADVANTAGES[name]))
    assert [partial[0], *partial[2:]] == whole and partial[1] is None


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_of_a_group_of_one_is_finite(name):
    (advantage,) = values(assign_advantages(group(0.7), ADVANTAGES[name]))
    assert advantage == (0.7 if name == "chunk_returns" else 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_leaves_a_reward_that_is_no_number_to_its_rollout(name, bad):
    credited = assign_advantages(group(1.0, bad, 0.0), ADVANTAGES[name])
    assert [t.error for t in credited.trajectories] == [None, f"reward: {bad} is not finite", None]
    found, expected = values(credited), values(assign_advantages(group(1.0, 0.0), ADVANTAGES[name]))
    assert [found[0], found[2]] == expected


def test_a_missing_reward_fails_its_rollout_alone():
    credited = assign_advantages(group_of(rollout(1.0), rollout(None), rollout(0.0)), default_advantage)
    assert [t.error for t in credited.trajectories] == [None, "reward: missing", None]
    assert [t.advantage for t in credited.trajectories] == [0.5, None, -0.5]


def test_a_turns_reward_that_is_no_number_fails_its_rollout_alone():
    credited = assign_advantages(group_of(rollout(1.0, turn(reward=math.nan)), rollout(0.0)), default_advantage)
    assert [t.error for t in credited.trajectories] == ["reward: nan is not finite", None]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_no_advantage_to_the_last_bit(name):
    """31 times 0.0507 is not 31 times 0.0507 once it is rounded; an advantage of 1e-17 would be trained."""
    equal = group(*[0.050643736416427054] * 31)
    parameters = {"baseline": "group"} if name == "chunk_returns" else {}
    credited = assign_advantages(equal, lambda inputs: ADVANTAGES[name](inputs, **parameters))
    assert values(credited) == [0.0] * 31


# ---- what comes back


def test_one_list_per_rollout_becomes_the_turns_own_advantages():
    credited = assign_advantages(group_of(rollout(1.0, turn(), turn())), returning([[0.5, -2.0]]))
    assert [t.advantage for t in credited.trajectories[0].turns] == [0.5, -2.0]
    assert credited.trajectories[0].advantage is None


@pytest.mark.parametrize(
    "advantages",
    [
        np.array([0.5, -0.5]),
        (np.float32(0.5), np.float32(-0.5)),
        [np.array(0.5), np.array(-0.5)],
        iter([0.5, -0.5]),
    ],
    ids=["array", "scalars", "0-d arrays", "iterator"],
)
def test_numbers_may_be_numpys(advantages):
    credited = assign_advantages(group(1.0, 0.0), returning(advantages))
    assert [t.advantage for t in credited.trajectories] == [0.5, -0.5]
    assert all(type(t.advantage) is float for t in credited.trajectories)


def test_a_row_of_an_array_is_one_number_for_each_turn():
    credited = assign_advantages(group_of(rollout(1.0, turn(), turn())), returning(np.array([[0.5, -2.0]])))
    assert [t.advantage for t in credited.trajectories[0].turns] == [0.5, -2.0]


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        (1e39, "1e+39 is larger than float32 holds"),
        ([-1e39], "[-1e+39] is larger than float32 holds"),
        pytest.param(10**400, "inf is not finite", id="10**400"),
    ],
)
def test_an_advantage_beyond_float32_fails_its_rollout_alone(advantage, said):
    """In a sample it would be infinite, and stop the run."""
    credited = assign_advantages(group(1.0, 0.0), returning([advantage, 0.5]))
    assert [t.error for t in credited.trajectories] == [f"advantage: {said}", None]


def test_rewards_of_float32_whose_difference_is_beyond_it_fail_their_rollout_alone():
    credited = assign_advantages(group(3.4e38, -3.4e38, -3.4e38, -3.4e38), default_advantage)
    assert [t.error is None for t in credited.trajectories] == [False, True, True, True]


def test_a_nan_advantage_fails_its_rollout_alone():
    credited = assign_advantages(group(1.0, 0.0), returning([math.nan, 1.0]))
    assert [t.error for t in credited.trajectories] == ["advantage: nan is not finite", None]
    credited = assign_advantages(group(1.0, 0.0), returning([[math.inf], [1.0]]))
    assert [t.error for t in credited.trajectories] == ["advantage: [inf] is not finite", None]


def raising(inputs):
    return 1 / 0


@pytest.mark.parametrize(
    ("function", "explained"),
    [
        (returning([1.0]), r"returned 1 advantages; expected .*one for each of 2 rollouts"),
        (returning([[1.0], [1.0, 2.0, 3.0]]), "3 advantages for the 1 turns of rollout 1"),
        (returning([0.5, None]), r"returned None for rollout 1 .*expected a number, or a list"),
        (returning([0.5, "1"]), r"returned '1' for rollout 1 \(a string\); expected a number, or a list"),
        (returning(["high", 0.5]), "returned 'high' for rollout 0"),
        (returning([[[1.0]], 0.5]), r"returned \[\[1\.0\]\] for rollout 0"),
        (returning("ab"), "returned AdvantageOutputs; expected AdvantageOutputs"),
        (returning({0: 0.5, 1: 0.5}), "expected AdvantageOutputs"),
        (returning(None), "expected AdvantageOutputs"),
        (lambda inputs: [0.5, -0.5], "returned list; expected AdvantageOutputs"),
        (lambda inputs: None, "returned NoneType; expected AdvantageOutputs"),
        (raising, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_anything_else_names_the_function_and_the_group(function, explained):
    with pytest.raises(ComponentError, match=rf"advantage {function.__qualname__}, group g7: .*{explained}"):
        assign_advantages(group(1.0, 0.0), function)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_passes_the_try_before_a_run(name, caplog):
    try_advantage(ADVANTAGES[name])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("function", "explained"),
    [
        (lambda inputs: None, "returned NoneType; expected AdvantageOutputs"),
        (returning([1.0]), "returned 1 advantages; expected"),
        (returning([[1.0], [0.0]]), "1 advantages for the 2 turns of rollout 0"),
        (returning(["high", 0.5]), "returned 'high' for rollout 0"),
    ],
)
def test_what_no_rollout_can_be_credited_with_is_refused_before_a_run(function, explained):
    with pytest.raises(ComponentError, match=explained):
        try_advantage(function)


def test_an_advantage_that_reads_more_than_made_up_rollouts_have_is_warned_about(caplog):
    try_advantage(lambda inputs: AdvantageOutputs(advantages=[r.info["seconds"] for r in inputs.rollouts]))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "tried on two made-up rollouts: raised KeyError: 'seconds'; the run will stop with this error" in said


# ---- length penalties


def test_a_length_penalty_shapes_what_the_advantage_sees_and_not_the_trajectory():
    # 1 - 0.1 * (5 - 3) = 0.8 against 0.4: the mean is 0.6.
    penalty = LengthPenaltyConfig(type="tokens", target=3, slope=0.1)
    credited = assign_advantages(group_of(rollout(1.0, turn(5)), rollout(0.4, turn(3))), default_advantage, penalty)
    assert [t.advantage for t in credited.trajectories] == pytest.approx([0.2, -0.2], abs=1e-12)
    assert [t.reward for t in credited.trajectories] == [1.0, 0.4]


def test_a_penalty_that_tells_equal_rewards_apart_makes_a_signal():
    # A bonus of 1 - 2/4 for the shorter one: rewards 1.5 and 1.
    penalty = LengthPenaltyConfig(type="tokens", kind="relative")
    credited = assign_advantages(group_of(rollout(1.0, turn(2)), rollout(1.0, turn(6))), default_advantage, penalty)
    assert [t.advantage for t in credited.trajectories] == pytest.approx([0.25, -0.25], abs=1e-12)


def test_rollouts_without_a_reward_are_in_no_penalty():
    penalty = LengthPenaltyConfig(type="turns", kind="relative")
    short = rollout(math.nan, turn())
    credited = assign_advantages(group_of(short, rollout(1.0, *[turn()] * 3), rollout(0.0)), default_advantage, penalty)
    assert [t.advantage for t in credited.trajectories[1:]] == [0.5, -0.5]


def test_chunk_returns_feel_a_penalty_where_the_turns_rewards_are_the_reward():
    # Turn rewards 0.25 + 0.75 = 1; the penalty of 0.2 falls on the last turn.
    rewarded = rollout(1.0, turn(2, 0.25), turn(2, 0.75), info={TURN_REWARDS_SUM: True})
    penalty = LengthPenaltyConfig(type="tokens", target=2, slope=0.1)
    credited = assign_advantages(group_of(rewarded), lambda i: chunk_returns_advantage(i, gamma=1.0), penalty)
    assert [t.advantage for t in credited.trajectories[0].turns] == pytest.approx([0.8, 0.55], abs=1e-12)


def test_memory_that_runs_out_in_an_advantage_is_not_its_fault():
    def full(inputs):
        raise MemoryError

    with pytest.raises(MemoryError):
        assign_advantages(group(1.0, 0.0), full)
