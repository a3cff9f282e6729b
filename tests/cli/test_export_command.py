"""`verbatim export`: the lines are the trajectories; what cannot be exported is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verbatim.cli.main import main
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory, Turn
from verbatim.logs.monitors.trajectory_log import read_trajectories
from verbatim.logs.outcomes.files import OutcomeFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = OutcomeFolder(tmp_path / "run" / "trajectories")
    for step in (1, 2, 3):
        turn = Turn(prompt_ids=[1, 2], completion_ids=[step], logprobs=[-0.5])
        trajectory = Trajectory(example_id="x", trajectory_id=f"t{step}", turns=(turn,), reward=1.0)
        files.write(step, [TrajectoryOutcome(trajectory=trajectory, turns=("trained",))])
    return tmp_path / "run"


@pytest.mark.parametrize(("options", "steps"), [((), [1, 2, 3]), (("--steps", "2"), [2]), (("--steps", "2-9"), [2, 3])])
def test_every_trajectory_of_the_steps_is_a_line(run: Path, capsys, options, steps):
    assert main(["export", str(run), "--out", "out.jsonl", *options]) == 0
    assert f"wrote {len(steps)} trajectories to out.jsonl" in capsys.readouterr().out
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    assert [line["trajectory"]["turns"][0]["completion_ids"] for line in lines] == [[step] for step in steps]
    assert [t.trajectory_id for _, t in read_trajectories(Path("out.jsonl"))] == [f"t{step}" for step in steps]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--out", "out.jsonl"], "there is no folder nowhere. Type verbatim export FOLDER with"),
        ([".", "--out", "out.jsonl"], "found run. Type verbatim export FOLDER with"),
        (["run", "--out", "out.jsonl", "--steps", "9-2"], "--steps 9-2: expected a step or a range, such as 7 or 3-9"),
        (["run", "--out", "out.jsonl", "--steps", "5"], "run has no trajectories of the steps 5; out.jsonl was not"),
        (["run", "--out", "out.jsonl", "--steps", "0"], "run has no trajectories of the steps 0; out.jsonl was not"),
        (["run", "--out", "run"], "--out run exists already; name a new file"),
    ],
)
def test_what_cannot_be_exported_is_refused(run: Path, capsys, arguments, says):
    assert main(["export", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_a_damaged_file_leaves_no_half_of_an_export(run: Path, capsys):
    damaged = sorted((run / "trajectories").glob("*.parquet"))[1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["export", "run", "--out", "out.jsonl"]) != 0
    assert damaged.name in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["run"]
