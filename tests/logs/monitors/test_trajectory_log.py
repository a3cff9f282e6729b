"""Trajectories come back from JSON exactly as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.core.errors import UsageError
from verbatim.core.trajectory_json import trajectory_from_json, trajectory_to_json
from verbatim.core.types import StopReason, ToolCall, Trajectory, Turn, TurnTiming
from verbatim.logs.monitors import TrajectoryLog, read_trajectories


def full() -> Trajectory:
    first = Turn(
        prompt_ids=[1, 2],
        completion_ids=[3, 4],
        logprobs=[-0.1, -1e-30],
        policy_versions=[7, 8],
        temperature=0.7,
        tool_calls=[
            ToolCall(name="guess", arguments={"number": 3}, raw="{}", id="c1"),
            ToolCall(name=None, arguments=None, status="invalid_json", raw="{\ud800"),
        ],
        parse_status="invalid_json",
        timing=TurnTiming(queued=0.25, generated=1.5, tools=0.125),
        reward=0.5,
    )
    second = Turn(
        prompt_ids=[1, 2, 3, 4, 5],
        completion_ids=[6],
        logprobs=None,
        stop_reason="length",
        advantage=-0.25,
        state_key="s",
        agent="sub/1",
    )
    third = Turn(prompt_ids=[1, 2, 9], completion_ids=[], logprobs=[])
    return Trajectory(
        example_id="x",
        turns=(first, second, third),
        reward=1.0,
        reward_parts={"found": 0.75, "format": 0.25},
        env="e",
        messages=({"role": "user", "content": "é\n"}, {"role": "assistant", "content": "a", "tool_calls": []}),
        trajectory_id="t",
        run_id="r",
        group_id="g",
        sample_index=3,
        seed=2**63,
        advantage=0.1,
        stop_reason="max_turns",
        truncated=True,
        error="tool: broke",
        info={"tool_errors": {"guess": 1}},
    )


def assert_same(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        if field.name != "turns":
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    assert len(a.turns) == len(b.turns)
    for x, y in zip(a.turns, b.turns, strict=True):
        for name in ["prompt_ids", *(field.name for field in dataclasses.fields(Turn) if field.name != "path")]:
            left, right = getattr(x, name), getattr(y, name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes(), name
            else:
                assert left == right, name


def test_every_field_comes_back(tmp_path: Path):
    log = TrajectoryLog(tmp_path / "trajectories.jsonl")
    log.write(7, full())
    log.write(8, Trajectory(example_id="empty"))
    log.close()
    (step, first), (next_step, second) = read_trajectories(tmp_path / "trajectories.jsonl")
    assert (step, next_step) == (7, 8)
    assert_same(first, full())
    assert_same(second, Trajectory(example_id="empty"))
    assert first.stop_reason is StopReason.MAX_TURNS
    assert first.turns[1].stop_reason is StopReason.LENGTH


def test_a_prompt_is_written_as_what_it_adds_to_an_earlier_turn():
    turns = trajectory_to_json(full())["turns"]
    prompts = [(t["prompt"]["of_turn"], t["prompt"]["shared"], t["prompt"]["new_ids"].tolist()) for t in turns]
    # The third turn breaks: it shares [1, 2] with both, and the nearest earlier turn is named.
    assert prompts == [(None, 0, [1, 2]), (0, 4, [5]), (1, 2, [9])]


def test_prompts_are_shared_again_after_turns_were_replaced():
    """Assigning advantages copies turns, so that sharing cannot be read off object identity."""
    trajectory = full()
    copied = trajectory.replace(turns=tuple(t.replace(advantage=1.0) for t in trajectory.turns))
    assert trajectory_to_json(copied)["turns"][1]["prompt"]["of_turn"] == 0


def test_a_long_trajectory_takes_memory_and_disk_in_proportion_to_its_tokens():
    ids = list(range(1000))
    turns = [Turn(prompt_ids=ids[: 20 * k + 10], completion_ids=ids[20 * k + 10 : 20 * k + 20]) for k in range(50)]
    trajectory = Trajectory(example_id="x", turns=turns)
    record = trajectory_to_json(trajectory)
    assert sum(len(t["prompt"]["new_ids"]) + len(t["completion_ids"]) for t in record["turns"]) == 1000
    back = trajectory_from_json(json.loads(json.dumps(record, default=np.ndarray.tolist)))
    assert back.num_stored_tokens == 1000


float32 = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(float32, min_size=1, max_size=20))
def test_logprobs_come_back_bit_for_bit(logprobs: list[float]):
    turn = Turn(prompt_ids=[1], completion_ids=[2] * len(logprobs), logprobs=logprobs)
    record = trajectory_to_json(Trajectory(example_id="x", turns=(turn,)))
    back = trajectory_from_json(json.loads(json.dumps(record, default=np.ndarray.tolist)))
    assert back.turns[0].logprobs is not None
    assert turn.logprobs is not None
    assert back.turns[0].logprobs.tobytes() == turn.logprobs.tobytes()


def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path):
    file = tmp_path / "trajectories.jsonl"
    file.write_text('{"format": 1, "step": 1, "trajectory": {"turns": []}}\n')
    with pytest.raises(UsageError, match=r"trajectories.jsonl:1: not a Verbatim trajectory \(KeyError: 'reward'\)"):
        list(read_trajectories(file))
