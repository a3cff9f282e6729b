"""A finished run is reported on the console and kept as text; what cannot be read or written costs only itself."""

from __future__ import annotations

import io
import logging
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from verbatim import Trajectory
from verbatim.config import load_config
from verbatim.core.plain_console import PlainConsole
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.environments.guess_number import GuessNumber
from verbatim.logs.checkpoints import RunFolder
from verbatim.logs.monitors import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.run.report import WIDTH, report

SUMMARY = {"success_before_rl": 0.25, "steps": 2, "environments": {"game": {}}}


@pytest.fixture
def folder(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    config = load_config(tmp_path / "run.toml", ["--run-dir", str(tmp_path / "mine")])
    with RunFolder.create(config, name="x", now=datetime(2026, 1, 31)) as folder:
        metrics = MetricsLog(folder.metrics)
        metrics.on_eval(0, "game", {"success": 0.25})
        metrics.on_step(1, {"reward/mean": 0.5})
        metrics.on_eval(2, "game", {"success": 0.75})
        metrics.close()
        files = OutcomeFolder(folder.evaluations)
        for step, reward in ((0, 0.0), (2, 1.0)):
            said = ({"role": "user", "content": "go"}, {"role": "assistant", "content": f"after {step}"})
            files.write(
                step,
                [TrajectoryOutcome.of_evaluated(Trajectory(example_id="e", env="game", reward=reward, messages=said))],
            )
        yield folder


def reported(folder: RunFolder, **options: object) -> str:
    out = io.StringIO()
    report(SUMMARY, "title", folder, {"game": GuessNumber()}, PlainConsole(file=out, **options))
    return out.getvalue()


def test_in_a_notebook_the_report_is_shown_once_and_kept(folder, monkeypatch):
    """As Jupyter's kernel is recognised: rich shows what such a console prints as output of the cell."""
    kernel = type("ZMQInteractiveShell", (), {})()
    shown: list[str] = []
    monkeypatch.setattr("builtins.get_ipython", lambda: kernel, raising=False)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    report(SUMMARY, "title", folder, {"game": GuessNumber()}, PlainConsole())
    for what in ("title: learning curve", "title: results", "one episode before and after"):
        assert "".join(shown).count(what) == 1
        assert folder.summary_text.read_text().count(what) == 1


def test_the_report_has_curve_episode_and_figures_and_is_kept_as_plain_text(folder):
    printed = reported(folder, width=100)
    kept = folder.summary_text.read_text()
    for text in (printed, kept):
        assert "title: learning curve" in text
        assert "●  game: success 0.250 after step 0, 0.750 after step 2" in text
        assert "┄┄ game: best constant policy, 0.267" in text
        assert "one episode before and after: game, example e" in text and "after 2" in text
        assert "success_before_rl" in text and "0.250" in text and "environments" not in text
        assert text.index("learning curve") < text.index("before and after") < text.index("title: results")
    assert str(folder.summary_text) in printed
    assert max(map(len, kept.splitlines())) <= WIDTH and "\x1b" not in kept


def test_the_figures_have_one_format_and_those_of_each_environment_are_there(folder):
    figures = {
        "reward_before_rl": 0.5,
        "reward_parts_before_rl": {"style": 0.25},
        "gain_interval_95": [-0.0224, 0.0553],
    }
    summary = {"sampled_tokens": 19611, "seconds": 40.5, "environments": {"essays": figures}}
    report({**summary, "best": None}, "title", folder, {}, PlainConsole(file=io.StringIO()))
    _, _, rows = folder.summary_text.read_text().partition("results")
    assert [line.split(maxsplit=1) for line in map(str.strip, rows.splitlines()) if line] == [
        ["sampled_tokens", "19,611"],
        ["seconds", "40.50"],
        ["essays.reward_before_rl", "0.500"],
        ["essays.reward_parts_before_rl.style", "0.250"],
        ["essays.gain_interval_95", "[-0.022, 0.055]"],
    ]


def test_a_terminal_gets_what_its_width_and_encoding_take(folder):
    assert max(map(len, reported(folder, width=60).partition("title: results")[0].splitlines())) <= 60
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    report(SUMMARY, "title", folder, {"game": GuessNumber()}, PlainConsole(file=out, width=80))
    out.flush()
    assert b"O  game: success 0.250" in out.buffer.getvalue()


def test_a_run_without_evaluations_has_no_episode_to_show(folder):
    shutil.rmtree(folder.evaluations)
    folder.metrics.write_text("")
    text = reported(folder)
    assert "curve" not in text and "before and after" not in text and "success_before_rl" in text


def test_a_damaged_log_costs_what_would_be_shown_of_it(folder, caplog):
    (folder.evaluations / "step-000002.parquet").write_text("nonsense\n")
    with caplog.at_level(logging.ERROR):
        text = reported(folder)
    assert "title: learning curve" in text and "before and after" not in text and "success_before_rl" in text
    assert "the report is incomplete" in caplog.text
    assert "evaluations/step-000002.parquet cannot be read" in caplog.text


def test_a_report_that_cannot_be_written_is_printed(folder, caplog):
    folder.summary_text.mkdir()
    assert "title: results" in reported(folder)
    assert "summary.txt could not be written" in caplog.text


def test_a_report_that_fails_ends_no_finished_run(folder, caplog):
    """The environment is asked what a success is, and may raise."""

    class Strange(GuessNumber):
        def is_success(self, trajectory: Trajectory) -> bool:
            raise ZeroDivisionError("of the environment")

    out = io.StringIO()
    with caplog.at_level(logging.ERROR):
        report(SUMMARY, "title", folder, {"game": Strange()}, PlainConsole(file=out))
    assert "the report of the run could not be made: ZeroDivisionError: of the environment" in caplog.text
    assert str(folder.summary) in caplog.text
