"""The trajectories in a table are spread over the rewards, always the same ones, and harmless as text."""

from __future__ import annotations

import pytest

from logs.monitors.outcomes_made import HOSTILE, outcome
from verbatim.core.errors import UsageError
from verbatim.logs.monitors.conversation import conversation_text
from verbatim.logs.monitors.samples import LONGEST, chosen, sample_row, sample_rows
from verbatim.logs.monitors.service import ServiceSettings


def names(found: list) -> list[str]:
    return [f.trajectory.trajectory_id for f in found]


def test_the_best_the_worst_and_what_is_between_are_chosen():
    outcomes = [outcome(f"t{n}", reward=n / 10) for n in (3, 0, 9, 6, 1)]
    assert names(chosen(outcomes, 3)) == ["t9", "t3", "t0"]
    assert names(chosen(outcomes, 2)) == ["t9", "t0"]
    assert names(chosen(outcomes, 1)) == ["t9"]
    assert names(chosen(outcomes, 9)) == ["t9", "t6", "t3", "t1", "t0"]


def test_equal_rewards_are_in_the_order_of_their_ids_whatever_order_they_came_in():
    outcomes = [outcome(name, reward=1.0) for name in "cab"]
    assert names(chosen(outcomes, 3)) == names(chosen(outcomes[::-1], 3)) == ["a", "b", "c"]


def test_those_without_a_reward_fill_up_only():
    outcomes = [
        outcome("none", reward=None, error="environment: broke"),
        outcome("one", reward=1.0),
        outcome("two", reward=0.0),
    ]
    assert names(chosen(outcomes, 2)) == ["one", "two"]
    assert names(chosen(outcomes, 3)) == ["one", "two", "none"]


def test_a_row_says_what_became_of_the_trajectory():
    row = sample_row(7, outcome("a", 0.5, reason="stale", advantage=0.25))
    assert (row.step, row.env, row.trajectory_id, row.reward, row.advantage) == (7, "game", "a", 0.5, 0.25)
    assert (row.outcome, row.turns, row.sampled_tokens) == ("stale", 1, 3)
    assert row.conversation == "[user]\ngo\n\n[assistant]\nhello"
    assert sample_row(7, outcome("a", 0.5)).outcome == "trained"


def test_control_characters_are_written_out_and_long_conversations_cut():
    row = sample_row(1, outcome("a", 1.0, text=HOSTILE))
    assert "\\x1b[31mred" in row.conversation and "\x1b" not in row.conversation
    long = sample_row(1, outcome("a", 1.0, text="x" * 50_000)).conversation
    assert len(long) < LONGEST + 50 and "x [cut: " in long


def test_a_key_of_the_environment_is_not_in_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "hf_abcdefghijklmnopqrstuv")
    row = sample_row(1, outcome("a", 1.0, text="the key is hf_abcdefghijklmnopqrstuv"))
    assert "hf_abc" not in row.conversation and "[redacted]" in row.conversation


def test_messages_of_any_shape_are_shown():
    odd = [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}, {"content": 7}]
    assert conversation_text(odd, 100) == "[assistant]\n?()\n\n[]\n7"


def test_only_some_steps_have_a_table():
    table = [outcome("a", 1.0)]
    assert [step for step in range(1, 10) if sample_rows(step, table, count=1, interval=4)] == [1, 4, 8]
    assert sample_rows(1, table, count=0, interval=1) == []


@pytest.mark.parametrize("parameters", [{"sample_interval": 0}, {"samples": -1}])
def test_tables_that_cannot_be_made_are_refused(parameters: dict[str, int]):
    class Settings(ServiceSettings):
        package = "pytest"

    with pytest.raises(UsageError, match="expected at least 0 and at least 1"):
        Settings(**parameters)
