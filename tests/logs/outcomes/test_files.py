"""Outcome files: exact round trips, what a checkpoint remembers, what is kept, and what other libraries read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verbatim.core.errors import UsageError
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectory_json import NOT_WRITTEN, plain, trajectory_to_json, was_cut
from verbatim.core.types import ToolCall, Trajectory, Turn, TurnTiming
from verbatim.logs.monitors.trajectory_log import read_trajectories
from verbatim.logs.outcomes.files import OutcomeFolder, files_in, read_outcomes
from verbatim.logs.outcomes.retention import Retention
from verbatim.logs.outcomes.schema import SCHEMA, TURN


def text_of(trajectory: Trajectory) -> str:
    return json.dumps(plain(trajectory_to_json(trajectory)))


FIRST = Turn(
    prompt_ids=[1, 2, 3],
    completion_ids=[4, 5],
    logprobs=[-0.1, -2.0],
    policy_versions=[6, 7],
    temperature=0.7,
    reward=-0.25,
    advantage=float("inf"),
    state_key="room \udce9",
    agent="sub/1",
    parse_status="invalid_json",
    tool_calls=[ToolCall(name=None, arguments={"a": [1, None]}, status="invalid_json", raw="<x>", id="7")],
    timing=TurnTiming(queued=0.1, generated=0.2, tools=0.3),
    stop_reason="length",
    routed_experts=np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3),
    kept_sets=[[4, 2**31 - 1, 0], []],
)
SECOND = Turn(prompt_ids=[1, 2, 3, 4, 5, 9], completion_ids=[8])
PLAYED = Turn(prompt_ids=[1, 2, 99], completion_ids=[7, 7], logprobs=[-1.0, -1.0], trained=False)
EMPTY = Turn(prompt_ids=[5], completion_ids=[])
FULL = Trajectory(
    example_id="x", turns=(FIRST, SECOND, PLAYED, EMPTY), messages=({"role": "user", "content": "é\u202e <b>"},),
    tools=({"type": "function"},), reward=0.1 + 0.2, reward_parts={"right": 1.0, "short": float("nan")},
    agent_rewards={"sub/1": 0.5}, env="game",
    trajectory_id="g-0", run_id="r", group_id="g", sample_index=3, seed=2**63 - 1, advantage=-1.5, stop_reason="stop",
    truncated=True, info={"task": {"n": [1]}}, num_unrecorded_tokens=5, num_unrecorded_turns=2,
)  # fmt: skip
OUTCOME = TrajectoryOutcome(
    trajectory=FULL,
    turns=("trained", "missing_logprobs", "untrained", "trained"),
    unrecorded="cancelled",
    flags=("gibberish", "repetition"),
    trainer_logprobs=(np.float32([-0.1, -2.5]), None, None, np.zeros(0, np.float32)),
    gradients=(np.float32([1.5, -0.25]), None, None, np.zeros(0, np.float32)),
    teacher_logprobs=(np.float32([-0.5, -0.75]), None, None, None),
)
FAILED = TrajectoryOutcome.of_dropped(
    Trajectory(example_id="y", group_id="h", env="game", error="raised: KeyError"), "error"
)


def figures_in(folder: Path) -> dict[str, list]:
    """The columns of a folder's files that hold neither tokens nor texts, as any program reads them."""
    names = [name for name in SCHEMA.names if name not in ("messages", "tools", "info", "turns")]
    return pq.read_table(folder, columns=names, partitioning=None).to_pydict()


@pytest.mark.slow
def test_what_is_read_is_what_was_written_to_the_last_bit(tmp_path: Path):
    OutcomeFolder(tmp_path).write(12, [OUTCOME, FAILED])
    (step, outcome), (_, failed) = read_outcomes(tmp_path)
    same = FULL.replace(turns=[FIRST.replace(state_key="room \\udce9"), *FULL.turns[1:]])  # no text of UTF-8 has it
    assert step == 12
    assert text_of(outcome.trajectory) == text_of(same)
    assert (outcome.turns, outcome.unrecorded, outcome.reason, outcome.flags) == (
        OUTCOME.turns,
        "cancelled",
        None,
        ("gibberish", "repetition"),
    )
    told = [
        (a if a is None else a.tolist(), b if b is None else b.tolist())
        for a, b in zip(outcome.trainer_logprobs, outcome.gradients, strict=True)
    ]
    assert told == [(np.float32([-0.1, -2.5]).tolist(), [1.5, -0.25]), (None, None), (None, None), ([], [])]
    assert failed.trainer_logprobs == failed.gradients == failed.teacher_logprobs == ()
    assert outcome.teacher_logprobs[0].tolist() == [-0.5, -0.75] and outcome.teacher_logprobs[1:] == (None, None, None)
    assert text_of(failed.trajectory) == text_of(FAILED.trajectory) and failed.reason == "error"
    assert outcome.trajectory.turns[1].extends(outcome.trajectory.turns[0])


def test_every_field_of_a_trajectory_and_of_a_turn_has_a_column():
    derived = {
        "path": {"prompt_of_turn", "prompt_shared", "prompt_new_ids"},
        "attachments": set(),
        "timing": {"seconds_queued", "seconds_generated", "seconds_tools"},
    }
    of_turn = set().union(*(derived.get(f.name, {f.name}) for f in dataclasses.fields(Turn)))
    assert {field.name for field in TURN} == of_turn | {"outcome", "trainer_logprobs", "gradients", "teacher_logprobs"}
    of_trajectory = {f.name for f in dataclasses.fields(Trajectory)}
    figures = {"num_turns", "num_sampled_tokens", "num_trained_tokens", "num_breaks"}
    assert set(SCHEMA.names) == of_trajectory | figures | {"step", "reason", "unrecorded", "flags"}
    assert all(field.metadata[b"description"] for field in [*SCHEMA, *TURN])


def test_a_trajectory_that_is_not_json_is_kept_without_its_messages_and_says_so(tmp_path: Path):
    files = OutcomeFolder(tmp_path)
    nested: list = []
    nested.append(nested)
    bad = [FULL.replace(info={"seen": value}, trajectory_id=str(i)) for i, value in enumerate(({1}, nested, 2.5))]
    files.write(1, [TrajectoryOutcome.of_dropped(t, "stale") for t in bad])
    read = [outcome.trajectory for _, outcome in read_outcomes(tmp_path)]
    assert [(t.messages, t.tools) for t in read[:2]] == [((), ())] * 2
    assert read[0].info == {
        NOT_WRITTEN: "messages and info were not written: TypeError: Object of type set is not JSON serializable"
    }
    assert [was_cut(trajectory) for trajectory in read] == [True, True, False]
    assert read[2].messages == FULL.messages and read[2].info == {"seen": 2.5}
    assert files.num_incomplete == 2


@pytest.mark.parametrize(
    "info", [{NOT_WRITTEN: 1}, {NOT_WRITTEN: "messages"}, {"a": {NOT_WRITTEN: "x"}}, {"a": NOT_WRITTEN}]
)
def test_an_environments_own_key_of_that_name_raises_no_alarm(tmp_path: Path, info):
    files = OutcomeFolder(tmp_path)
    files.write(1, [TrajectoryOutcome.of_dropped(FULL.replace(info=info), "stale")])
    ((_, outcome),) = read_outcomes(tmp_path)
    assert (files.num_incomplete, outcome.trajectory.info, was_cut(outcome.trajectory)) == (0, info, False)


def test_info_is_written_as_plain_values_whatever_its_keys_and_numbers_are(tmp_path: Path):
    told = {True: 1, None: [np.int64(2), np.float32(0.5)], 3: float("nan"), "x": {"true": np.arange(2)}, 2.5: (1, "é")}
    OutcomeFolder(tmp_path).write(1, [TrajectoryOutcome.of_dropped(FULL.replace(info={"told": told}), "stale")])
    ((_, outcome),) = read_outcomes(tmp_path)
    assert outcome.trajectory.info == {
        "told": {"True": 1, "None": [2, 0.5], "3": "NaN", "x": {"true": [0, 1]}, "2.5": [1, "é"]}
    }


def test_names_that_are_numbers_are_written_as_texts(tmp_path: Path):
    numbered = FULL.replace(reward_parts={1: 0.5}, turns=[SECOND.replace(agent=2)])
    OutcomeFolder(tmp_path).write(1, [TrajectoryOutcome.of_dropped(numbered, "stale")])
    ((_, outcome),) = read_outcomes(tmp_path)
    assert outcome.trajectory.reward_parts == {"1": 0.5} and outcome.trajectory.turns[0].agent == "2"


def test_the_figures_have_columns_of_their_own(tmp_path: Path):
    files = OutcomeFolder(tmp_path)
    files.write(1, [OUTCOME])
    files.write(2, [FAILED])
    found = figures_in(tmp_path)
    assert found["step"] == [1, 2]
    assert found["num_sampled_tokens"] == [2 + 1 + 2 + 5, 0] and found["num_trained_tokens"] == [2, 0]
    assert found["reason"] == [None, "error"] and found["num_breaks"] == [1, 0]
    assert found["flags"] == [["gibberish", "repetition"], []]


@pytest.mark.extras
def test_pandas_opens_the_files(tmp_path: Path):
    import pandas as pd

    files = OutcomeFolder(tmp_path / "trajectories")
    files.write(1, [OUTCOME, FAILED])
    frame = pd.read_parquet(tmp_path / "trajectories")
    assert frame["reward"].tolist()[0] == 0.1 + 0.2
    assert [turn["outcome"] for turn in frame["turns"][0]] == list(OUTCOME.turns)
    assert frame["turns"][0][0]["completion_ids"].tolist() == [4, 5]


@pytest.mark.extras
def test_datasets_opens_the_files(tmp_path: Path):
    import datasets

    OutcomeFolder(tmp_path / "trajectories").write(1, [OUTCOME, FAILED])
    found = datasets.Dataset.from_parquet(str(tmp_path / "trajectories" / "*.parquet"), cache_dir=str(tmp_path / "c"))
    assert found[0]["turns"][0]["logprobs"] == [pytest.approx(-0.1), -2.0]


# ---- checkpoints


def written(folder: Path, count: int, **keep) -> OutcomeFolder:
    files = OutcomeFolder(folder, Retention(**keep))
    for step in range(1, count + 1):
        files.write(step, [TrajectoryOutcome.of_dropped(FULL.replace(trajectory_id=f"t{step}"), "stale")])
    return files


def test_a_resumed_run_removes_the_files_of_steps_that_are_done_again(tmp_path: Path):
    marks = json.loads(json.dumps(written(tmp_path, 2).marks()))
    written(tmp_path, 4)
    resumed = OutcomeFolder(tmp_path)
    assert resumed.restore(2, marks) == []
    assert list(files_in(tmp_path)) == [1, 2] == list(resumed.files)
    assert resumed.restore(0, {}) == []
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("folder_instead", [False, True])
def test_a_damaged_file_is_kept_beside_the_folder_and_named(tmp_path: Path, folder_instead: bool):
    folder = tmp_path / "trajectories"
    marks = written(folder, 3).marks()
    path = folder / "step-000002.parquet"
    if folder_instead:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    resumed = OutcomeFolder(folder)
    aside = tmp_path / "step-000002.parquet.damaged-1"
    assert resumed.restore(3, marks) == [
        f"{path} is damaged: its content is not what was written. It is kept as {aside}"
    ]
    assert aside.exists() and list(resumed.marks()) == ["1", "3"]
    assert [step for step, _ in read_outcomes(folder)] == [1, 3]
    assert pq.read_table(folder, columns=["step"])["step"].to_pylist() == [1, 3]


def test_missing_files_are_named_in_one_sentence(tmp_path: Path):
    marks = written(tmp_path, 6).marks()
    for step in (2, 3, 5):
        (tmp_path / f"step-00000{step}.parquet").unlink()
    assert OutcomeFolder(tmp_path).restore(6, marks) == [f"{tmp_path}: the files of steps 2-3, 5 are missing"]
    shutil.rmtree(tmp_path)
    assert OutcomeFolder(tmp_path).restore(6, marks) == [f"{tmp_path}: the files of steps 1-6 are missing"]


# ---- what is kept


def test_the_newest_steps_are_kept(tmp_path: Path):
    assert list(written(tmp_path, 5, steps=2).files) == [4, 5] == list(files_in(tmp_path))


def test_the_oldest_files_are_removed_when_all_are_too_large_together(tmp_path: Path):
    size = written(tmp_path / "one", 1).files[1].size
    assert list(written(tmp_path / "few", 5, size=3 * size).files) == [3, 4, 5]
    assert list(written(tmp_path / "last", 3, size=1).files) == [3]  # the newest one is always there


def test_what_was_removed_for_its_age_is_not_missing_at_a_resume(tmp_path: Path):
    marks = written(tmp_path, 3).marks()
    written(tmp_path, 4, steps=2)
    assert OutcomeFolder(tmp_path, Retention(steps=2)).restore(3, marks) == []


def test_a_share_takes_whole_groups_and_always_the_same(tmp_path: Path):
    outcomes = [
        TrajectoryOutcome.of_dropped(FULL.replace(group_id=f"g{n // 4}", trajectory_id=str(n)), "stale")
        for n in range(800)
    ]
    OutcomeFolder(tmp_path / "a", Retention(share=0.25)).write(1, outcomes)
    OutcomeFolder(tmp_path / "b", Retention(share=0.25)).write(1, outcomes)
    groups = figures_in(tmp_path / "a")["group_id"]
    assert groups == figures_in(tmp_path / "b")["group_id"]
    counts = {group: groups.count(group) for group in groups}
    assert set(counts.values()) == {4}
    assert 0.25 * 200 * 0.6 < len(counts) < 0.25 * 200 * 1.4


# ---- reading


@pytest.mark.parametrize("name", ["trajectories", ".", "trajectories/step-000001.parquet"])
def test_trajectories_are_read_from_a_run_its_folder_or_a_file(tmp_path: Path, name: str):
    OutcomeFolder(tmp_path / "trajectories").write(1, [OUTCOME])
    ((step, trajectory),) = read_trajectories(tmp_path / name)
    assert (step, trajectory.trajectory_id) == (1, "g-0")


def test_what_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="has no trajectories; expected a folder with files such as step-000001"):
        list(read_outcomes(tmp_path))
    path = tmp_path / "step-000001.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(
        UsageError, match=r"step-000001\.parquet cannot be read as a file of Verbatim's trajectories \(Arrow"
    ):
        list(read_outcomes(tmp_path))
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(
        UsageError, match=r"step-000001\.parquet has no format number; this version of Verbatim reads format 3"
    ):
        list(read_outcomes(path))
    table = SCHEMA.with_metadata({b"verbatim_format": b"9"}).empty_table()
    pq.write_table(table, path)
    with pytest.raises(UsageError, match="has format 9; this version of Verbatim reads format 3"):
        list(read_outcomes(path))


# ---- row groups


def test_long_trajectories_are_read_without_their_neighbours(tmp_path: Path):
    """Reading one row reads its row group: short ones lie together, a long one alone."""
    long = FULL.replace(messages=({"role": "user", "content": "x" * 5_000_000},), trajectory_id="long")
    short = [FULL.replace(trajectory_id=f"t{i}") for i in range(130)]
    OutcomeFolder(tmp_path).write(1, [TrajectoryOutcome.of_dropped(t, "stale") for t in (*short[:2], long, *short[2:])])
    with pq.ParquetFile(tmp_path / "step-000001.parquet") as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == [2, 1, 128]
    assert pq.read_table(tmp_path / "step-000001.parquet").num_rows == 131
    assert [outcome.trajectory.trajectory_id for _, outcome in read_outcomes(tmp_path)] == [
        "t0",
        "t1",
        "long",
        *(f"t{i}" for i in range(2, 130)),
    ]


def test_a_step_without_trajectories_has_a_file_too(tmp_path: Path):
    OutcomeFolder(tmp_path).write(1, [])
    assert list(read_outcomes(tmp_path)) == [] and figures_in(tmp_path)["step"] == []
