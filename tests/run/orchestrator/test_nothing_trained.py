"""The reason that took most tokens decides what is advised; a rate of failures is always named."""

from __future__ import annotations

import re

import pytest

from verbatim.core.trajectories import Ledger
from verbatim.core.types import Trajectory
from verbatim.rollouts import EpisodeStats
from verbatim.run.orchestrator.nothing_trained import why_nothing_was_trained


def why(dropped, *, failed=0, trained=0):
    ledger, episode_stats = Ledger(), EpisodeStats()
    ledger.sampled_tokens(trained + sum(dropped.values()))
    ledger.settle_group(0, trained=trained, dropped=dropped)
    for _ in range(failed):
        episode_stats.ended(Trajectory(example_id="x", error="environment: score raised KeyError: 'x'"))
    return why_nothing_was_trained(ledger, episode_stats, num_steps=3)


@pytest.mark.parametrize(
    ("dropped", "advice"),
    [
        ({"stale": 7, "error": 2}, "orchestrator.max_off_policy_steps"),
        ({"over_length": 7}, "orchestrator.seq_len"),
        ({"filter:gibberish": 7}, r"\[warm_start\]"),
        ({"filter:zero_advantage": 7}, "rewards of each group were equal"),
        ({"difficulty": 7}, "online_difficulty_filtering = false"),
        ({"missing_logprobs": 7}, "no logprobs"),
    ],
)
def test_the_largest_reason_is_advised_about(dropped, advice):
    said = why(dropped)
    counts = ", ".join(f"{count} {name}" for name, count in dropped.items())
    assert said.startswith(f"in 3 steps no token was trained.\n  of {sum(dropped.values())} sampled tokens: {counts}")
    assert re.search(advice, said)


def test_failures_are_named_whatever_took_the_tokens():
    assert why({"error": 9}, failed=2).endswith("2 of 2 train episodes failed: 2 x environment: score raised KeyError")


def test_tokens_that_were_trained_with_the_advantage_0_are_said_to_have_taught_nothing():
    assert why({}, trained=12).startswith("12 tokens were trained, but the advantage of every one was 0")
