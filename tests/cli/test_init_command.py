"""`verbatim init` writes a project that runs at once."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import warm
from verbatim.cli.init_command import GATEWAY_CHECK, KINDS
from verbatim.cli.main import main

DEMO = Path(__file__).parents[2] / "recipes" / "guess_number.toml"
FILES = ["README.md", "my_env.py", "run.toml", "test_my_env.py"]
OF_A_PROGRAM = ["README.md", "agent.py", "conversations.jsonl", "run.toml", "tasks.jsonl", "test_agent.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_written_into_a_new_or_an_empty_folder(kind: str, tmp_path: Path, capsys):
    assert main(["init", str(tmp_path / "new" / "project"), "--kind", kind]) == 0
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty"), "--kind", kind]) == 0
    for folder in (tmp_path / "new" / "project", tmp_path / "empty"):
        assert sorted(path.name for path in folder.iterdir()) == (OF_A_PROGRAM if kind == "program" else FILES)
        assert len((folder / "README.md").read_text().splitlines()) <= 10
    assert ("gateway check" if kind == "program" else "verbatim env check my_env:MyEnv") in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_filters_as_the_demo_does(kind: str, tmp_path: Path):
    """Loops are punished by what they earn in both."""
    assert main(["init", str(tmp_path / "project"), "--kind", kind]) == 0
    demo, own = (tomllib.loads(path.read_text()) for path in (DEMO, tmp_path / "project" / "run.toml"))
    assert own["orchestrator"]["filters"] == demo["orchestrator"]["filters"] == [{"type": "zero_advantage"}]


def test_what_to_type_next_can_be_typed(tmp_path: Path, capsys, monkeypatch):
    """Folders with a space are quoted, and the packages of a program are named."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my agent", "--kind", "program"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == ["cd 'my agent'", "pip install openai", GATEWAY_CHECK, "verbatim rl run.toml"]
    assert GATEWAY_CHECK in (tmp_path / "my agent" / "README.md").read_text()


def test_tools_is_the_kind_if_none_is_named(tmp_path: Path):
    assert main(["init", str(tmp_path / "a")]) == 0
    assert main(["init", str(tmp_path / "b"), "--kind", "tools"]) == 0
    assert (tmp_path / "a" / "my_env.py").read_text() == (tmp_path / "b" / "my_env.py").read_text()


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path} is not empty: it holds notes.txt; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert main(["init", str(tmp_path / "notes.txt")]) == 2
    assert "is a file; name a new folder" in capsys.readouterr().err


def test_a_kind_that_does_not_exist_is_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "x"), "--kind", "toolz"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(kind in said for kind in ("--kind", "toolz", "tools", "chat", "subagents", "program"))
    assert not (tmp_path / "x").exists()


POLICYS_OWN = ("control_token", "other_end", "open_thought", "thought_dropped")


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_clean_passes_its_own_test_and_trains(kind: str, tmp_path: Path):
    """As a user would, with commands in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # options of these tests, which the project's pytest does not know

    def typed(*command: str, folder: Path) -> str:
        done = warm.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    project = tmp_path / "project"
    typed("verbatim.cli", "init", "project", "--kind", kind, folder=tmp_path)
    if kind != "program":
        report = json.loads(typed("verbatim.cli", "env", "check", "my_env:MyEnv", "--json", folder=project))
        assert (report["clean"], report["findings"]) == (True, [])
    else:
        (_, _, command, *options) = shlex.split(GATEWAY_CHECK)[1:]
        own = command.replace("python", shlex.quote(sys.executable), 1)
        assert "ended well" in typed("verbatim.cli", "gateway", "check", own, *options, folder=project)
    typed("pytest", "-q", "-p", "no:cacheprovider", folder=project)
    typed("verbatim.cli", "config", "run.toml", folder=project)
    few = [
        "--max-steps",
        "2",
        "--warm-start.steps",
        "30",
        "--warm-start.conversations",
        "60",
        "--orchestrator.batch-size",
        "8",
        "--orchestrator.group-size",
        "4",
        "--orchestrator.eval.episodes",
        "2",
    ]
    typed("verbatim.cli", "rl", "project/run.toml", *few, folder=tmp_path)  # from elsewhere: the file's folder counts
    summary = json.loads((tmp_path / "runs" / "run" / "latest" / "summary.json").read_text())
    assert summary["steps"] == 2
    if kind in ("tools", "chat"):
        lines = (tmp_path / "runs" / "run" / "latest" / "metrics.jsonl").read_text().splitlines()
        broken = Counter()
        for line in map(json.loads, lines):
            broken.update(
                {name: count for name, count in line["metrics"].items() if name.startswith("breaks")}
                if line["kind"] == "train"
                else {}
            )
        # What the policy sampled may break a prompt; the form of a turn, a template or the environment does not.
        sampled = sum(broken[f"breaks/{reason}"] for reason in POLICYS_OWN)
        assert broken["breaks"] == sampled, broken
