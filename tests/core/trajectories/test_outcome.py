"""The outcome of each turn's tokens, worked out by hand, beside the samples that are built of them."""

from __future__ import annotations

import pytest

from verbatim.core.trajectories import TrajectoryOutcome, build
from verbatim.core.types import Trajectory, Turn

SAID = Turn(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.5, -0.5])
WITHOUT = Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5, 6, 7])
PLAYED = Turn(prompt_ids=[9], completion_ids=[8], logprobs=[-1.0], trained=False)
LONG = Turn(prompt_ids=[1, 2, 3, 4, 5, 6, 7], completion_ids=[8, 9, 10, 11], logprobs=[-1.0] * 4)


def rollout(*turns: Turn, **fields) -> Trajectory:
    return Trajectory(example_id="x", turns=turns, advantage=1.0, **fields)


def test_each_turn_has_the_outcome_that_its_tokens_have_in_the_samples():
    outcome = build(rollout(SAID, WITHOUT, PLAYED, LONG, num_unrecorded_tokens=6), max_length=10).outcome
    assert outcome.turns == ("trained", "missing_logprobs", "untrained", "over_length")
    assert outcome.unrecorded == "cancelled"
    assert outcome.num_tokens == {"trained": 2, "missing_logprobs": 3, "untrained": 1, "over_length": 4, "cancelled": 6}
    assert (outcome.num_trained_tokens, outcome.reason) == (2, None)


def test_what_a_strategy_for_texts_needs_no_logprobs_for_is_trained():
    assert build(rollout(SAID, WITHOUT), needs_logprobs=False).outcome.turns == ("trained", "trained")


def test_of_a_failed_trajectory_everything_is_dropped_and_with_include_failed_only_what_no_turn_has():
    failed = rollout(SAID, error="raised: x", num_unrecorded_tokens=4)
    assert build(failed).outcome.num_tokens == {"error": 6}
    assert build(failed, include_failed=True).outcome.num_tokens == {"trained": 2, "error": 4}


def test_a_trajectory_that_is_dropped_whole_says_why_once():
    outcome = TrajectoryOutcome.of_dropped(rollout(SAID, PLAYED), "filter:gibberish", ["gibberish", "repetition"])
    assert (outcome.turns, outcome.unrecorded, outcome.reason) == (("filter:gibberish",) * 2, None, "filter:gibberish")
    assert outcome.flags == ("gibberish", "repetition")
    assert outcome.dropped == {"filter:gibberish": 3}


def test_a_turn_without_an_outcome_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="each turn needs an outcome"):
        TrajectoryOutcome(trajectory=rollout(SAID, PLAYED), turns=("trained",))
    with pytest.raises(AssertionError, match="unrecorded needs one too"):
        TrajectoryOutcome(trajectory=rollout(SAID, num_unrecorded_tokens=1), turns=("trained",))
