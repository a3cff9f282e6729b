"""What `verbatim config` accepts trains: it reaches its first optimizer step. What it refuses, `verbatim rl` refuses
before it makes a folder."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from campaigns import sized
from e2e.tiny_runs import build_tiny_model, train_lines, workplace
from run.drawn_projects import TASK, Project, draw, write_models
from verbatim.cli.main import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(build_tiny_model(folder / "tiny"), folder)
    return folder


def broken_promise(project: Project, folder: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """How a project does otherwise than `verbatim config` says of it; None = it does as said."""
    with workplace(folder, {"task": TASK}):
        project.write(folder)
        accepted = main(["config", "run.toml"])
        said = capsys.readouterr().err
        try:
            trained = main(["rl", "run.toml"])
        except Exception as error:  # noqa: BLE001  that of a fault of ours
            return f"config {accepted}, rl raised {error!r}"
        done = "".join(capsys.readouterr())
        made = Path("run").exists()
        if accepted == 0 and (trained != 0 or len(train_lines(Path("run"))) != 1):
            return f"accepted, and rl ended with {trained}: {done}"
        if accepted != 0 and ((accepted, trained) != (2, 2) or made or "Traceback" in said):
            return f"refused with {accepted}, and rl ended with {trained}{' in a folder' * made}: {said}\n{done}"
    shutil.rmtree(folder)
    return None


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.campaign
def test_what_config_accepts_trains_and_what_it_refuses_leaves_nothing(models: Path, tmp_path: Path, capsys, campaign):
    row = campaign("drawn projects")
    broken = {}
    for seed in range(sized(20, 200)):
        why = broken_promise(draw(seed, models), tmp_path / str(seed), capsys)
        row.add(wrong=why is not None)
        if why is not None:
            broken[seed] = why
    assert not broken


@pytest.mark.slow
@pytest.mark.realtime
def test_a_check_that_is_left_out_is_found(models: Path, tmp_path: Path, capsys, monkeypatch):
    """The planted fault: an episode is started, and nobody looks whether it can be scored."""
    monkeypatch.setattr("verbatim.rollouts.openings.wrong_episode", lambda episode: None)
    projects = (draw(seed, models) for seed in itertools.count())
    suspects = (project for project in projects if project.flaw == "a plain score")
    assert any(broken_promise(next(suspects), tmp_path / str(n), capsys) for n in range(3))
