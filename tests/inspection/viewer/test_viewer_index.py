"""The index follows a run folder: new steps, a resume, retention, torn and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from viewer_runs import make_run, read, serving, trained, trajectory

from verbatim.core.errors import UsageError
from verbatim.inspection.viewer.index import RunIndex
from verbatim.inspection.viewer.query import Filters
from verbatim.inspection.viewer.run_view import RunView
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.logs.outcomes.retention import Retention


def names(run: RunView, **filters: list[str]) -> list[str]:
    run.read_all()
    return [row["trajectory_id"] for row in run.rows(Filters.of(filters), sort="trajectory_id", limit=1000)["rows"]]


def rewards(run: RunView) -> dict[str, float]:
    return {row["trajectory_id"]: row["reward"] for row in run.rows(Filters(), limit=1000)["rows"]}


def test_new_steps_are_taken_in(tmp_path: Path):
    run = read(make_run(tmp_path, {1: [trained(trajectory("a"))]}))
    before = run.about()
    assert names(run) == ["a"] and run.about()["version"] == before["version"]
    make_run(tmp_path, {2: [trained(trajectory("b"))]}, evaluated={2: [trajectory("e")]})
    assert names(run) == ["a", "b", "e"]
    after = run.about()
    assert after["version"] > before["version"] and after["generation"] == before["generation"]
    make_run(tmp_path, evaluated={4: [trajectory("f")]})
    assert names(run) == ["a", "b", "e", "f"] and names(run, step=["4"]) == ["f"]


def test_a_resume_that_does_steps_again_is_a_new_generation(tmp_path: Path):
    steps = {step: [trained(trajectory(f"t{step}", reward=0.0))] for step in (1, 2, 3)}
    run = read(make_run(tmp_path, steps, evaluated={1: [trajectory("e1")], 3: [trajectory("e3")]}))
    before = run.about()["generation"]
    files = OutcomeFolder(tmp_path / "trajectories")
    files.restore(1, {})
    files.write(2, [trained(trajectory("t2", reward=1.0))])
    OutcomeFolder(tmp_path / "evaluations").restore(1, {})
    assert names(run) == ["e1", "t1", "t2"] and rewards(run)["t2"] == 1.0
    assert run.about()["generation"] > before


def test_evaluated_episodes_are_read_from_their_files_and_followed(tmp_path: Path):
    folder = make_run(tmp_path, {1: [trained(trajectory("t1"))]}, evaluated={0: [trajectory("e0")]})
    run = read(folder)
    assert names(run) == ["e0", "t1"]
    make_run(tmp_path, evaluated={1: [trajectory("e1"), trajectory("e2")]})
    assert names(run) == ["e0", "e1", "e2", "t1"]
    rows = {row["trajectory_id"]: row for row in run.rows(Filters(), limit=9)["rows"]}
    assert [(rows[name]["kind"], rows[name]["step"], rows[name]["reason"]) for name in ("t1", "e0", "e2")] == [
        ("train", 1, None),
        ("eval", 0, "evaluation"),
        ("eval", 1, "evaluation"),
    ]
    assert [rows[name]["key"] for name in ("t1", "e0", "e2")] == ["~1.0", "~v0.0", "~v1.1"]
    before = run.about()["generation"]
    OutcomeFolder(folder / "evaluations").restore(0, {})  # the run begins again
    assert names(run) == ["t1"] and run.about()["generation"] > before


def test_files_that_are_no_longer_kept_leave_the_table(tmp_path: Path):
    files = OutcomeFolder(tmp_path / "trajectories", Retention(steps=2))
    (tmp_path / "config.toml").write_text("[model]\n")
    for step in (1, 2):
        files.write(step, [trained(trajectory(f"t{step}"))])
    run = read(tmp_path)
    before = run.about()["generation"]
    files.write(3, [trained(trajectory("t3"))])
    assert names(run) == ["t2", "t3"]
    assert run.about()["generation"] == before  # nothing was done again


def test_torn_and_foreign_files_are_named_and_the_rest_is_shown(tmp_path: Path):
    run = read(make_run(tmp_path, {step: [trained(trajectory(f"t{step}"))] for step in (1, 2, 3)}))
    torn = tmp_path / "trajectories" / "step-000002.parquet"
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "trajectories" / "step-000009.parquet").write_bytes(b"")
    assert names(run) == ["t1", "t3"]
    first, second = run.about()["problems"]
    assert first.startswith("trajectories/step-000002.parquet cannot be read")
    assert second.startswith("trajectories/step-000009.parquet")
    torn.write_bytes(whole)
    (tmp_path / "trajectories" / "step-000009.parquet").unlink()
    assert names(run) == ["t1", "t2", "t3"] and run.about()["problems"] == []


@pytest.mark.realtime
async def test_a_row_whose_file_breaks_later_is_an_error_message(tmp_path: Path):
    folder = make_run(tmp_path, {1: [trained(trajectory("t1"))]})
    async with serving(folder) as client:
        path = folder / "trajectories" / "step-000001.parquet"
        data = bytearray(path.read_bytes())
        data[8:200] = b"\xff" * 192
        path.write_bytes(data)
        error = (await client.get("trajectories/t1", status=400))["error"]
        assert error.startswith("row 0 of trajectories/step-000001.parquet cannot be read")
        path.unlink()
        error = (await client.get("trajectories/t1", status=400))["error"]
        assert error == "row 0 of trajectories/step-000001.parquet: the file no longer exists"
        await client.get("trajectories")


def test_the_index_takes_few_bytes_for_each_trajectory(tmp_path: Path):
    outcomes = {
        step: [
            trained(
                trajectory(
                    f"train-{step}-{i}", example_id=f"example {i}", reward=0.5, error="x" * 5_000 if i == 7 else None
                )
            )
            for i in range(100)
        ]
        for step in range(1, 11)
    }
    index = RunIndex(make_run(tmp_path, outcomes))
    index.refresh()
    table = index.snapshot.table
    assert table.num_rows == 1_000 and table.nbytes < 300 * table.num_rows


def test_rows_in_several_row_groups_are_found_one_by_one(tmp_path: Path):
    flags = {i: ("long",) if i < 70 else ("loops", "long") for i in range(0, 200, 3)}
    outcomes = [
        trained(trajectory(f"t{i:03}", reward=i / 8, env="first" if i < 100 else "second"), flags=flags.get(i, ()))
        for i in range(200)
    ]
    run = read(make_run(tmp_path, {1: outcomes, 2: []}))
    assert run.about()["problems"] == []
    assert names(run, flag=["loops"]) == [f"t{i:03}" for i in range(72, 200, 3)]
    assert names(run, flag=["long"], env=["first"]) == [f"t{i:03}" for i in range(0, 100, 3)]
    for i in (0, 63, 64, 127, 128, 199):
        assert run.trajectory(f"~1.{i}")["trajectory_id"] == f"t{i:03}"
        assert run.trajectory(f"t{i:03}")["reward"] == i / 8


@pytest.mark.parametrize("made", ["nothing", "file", "empty", "others", "parent"])
def test_a_folder_that_is_no_run_is_refused_with_what_to_type(tmp_path: Path, made: str):
    path = tmp_path / "given"
    expected = "Type verbatim view FOLDER with a run folder, such as runs/NAME/latest"
    if made == "nothing":
        found = f"there is no folder {path}"
    elif made == "file":
        path.write_text("x")
        found, expected = f"{path} is a file", "expected a run folder, such as runs/NAME/latest"
    else:
        path.mkdir()
        found = "it has none of config.toml, metrics.jsonl, trajectories, evaluations; found nothing"
        if made == "others":
            (path / "a.txt").write_text("x")
            found = "found a.txt"
        if made == "parent":
            make_run(path / "20260101-000000")
            found, expected = "found 20260101-000000", f"Type verbatim view {path}/20260101-000000"
    with pytest.raises(UsageError) as error:
        RunView(path)
    assert found in str(error.value) and expected in str(error.value)


def test_of_many_bad_files_the_first_are_told_and_the_rest_counted(tmp_path: Path):
    folder = make_run(tmp_path, {1: [trained(trajectory("t1"))]})
    for step in range(2, 302):
        (folder / "trajectories" / f"step-{step:06d}.parquet").write_bytes(b"")
    run = read(folder)
    problems = run.about()["problems"]
    assert names(run) == ["t1"] and len(problems) == 51 and problems[-1] == "and 250 more"
