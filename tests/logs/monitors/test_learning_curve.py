"""The learning curve is read from the metrics log and drawn as one PNG."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from verbatim.core.errors import UsageError
from verbatim.logs.monitors import LearningCurve, MetricsLog
from verbatim.logs.monitors.learning_curve import Curve, draw_curve, read_curve


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.on_eval(0, "guess", {"success": 0.25})
    log.on_step(1, {"reward/mean": 0.375})
    log.on_step(2, {"reward/mean": math.nan})
    log.on_eval(2, "guess", {"success": 0.75})
    log.on_step(3, {"other": 1.0})
    log.close()
    return tmp_path / "metrics.jsonl"


def test_the_curve_has_rewards_by_step_and_success_by_environment(metrics: Path):
    curve = read_curve(metrics)
    assert curve.rewards[0] == (1, 0.375)
    assert curve.rewards[1][0] == 2
    assert math.isnan(curve.rewards[1][1])
    assert len(curve.rewards) == 2
    assert curve.evals == {"guess": [(0, 0.25), (2, 0.75)]}


@pytest.mark.slow
def test_the_first_and_last_evaluation_and_the_constant_policy_are_marked(metrics: Path, monkeypatch, tmp_path: Path):
    from matplotlib import figure

    drawn = []
    save = figure.Figure.savefig

    def savefig(self, *args, **kwargs):
        drawn.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    draw_curve(read_curve(metrics), tmp_path / "curve.png", best_constant={"guess": 4 / 15})
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["before: 0.25", "after: 0.75"]
    assert [text.xy for text in axes.texts] == [(0, 0.25), (2, 0.75)]
    (dashed,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(dashed.get_ydata()) == pytest.approx([4 / 15, 4 / 15])
    assert "guess: best constant policy, 0.27" in [text.get_text() for text in axes.get_legend().get_texts()]


def log_of(folder: Path, *, reward: float) -> Path:
    log = MetricsLog(folder / "metrics.jsonl")
    for step in (0, 1, 2):
        if step:
            log.on_step(step, {"reward/mean": reward, "success": 0.5})
        log.on_eval(step, "essays", {"reward/mean": reward, "success": 0.5, "episodes": 10, "failed": 0})
    log.close()
    return folder / "metrics.jsonl"


def test_reward_and_success_have_a_panel_each_where_they_differ(tmp_path: Path):
    one, two = (tmp_path / name for name in ("one", "two"))
    one.mkdir()
    two.mkdir()
    assert [(panel.name, panel.train_name) for panel in read_curve(log_of(one, reward=0.5)).panels] == [
        ("success", "reward")
    ]
    reward, success = read_curve(log_of(two, reward=0.75)).panels
    assert (reward.name, reward.train) == ("reward", [(1, 0.75), (2, 0.75)])
    assert reward.evals == {"essays": [(0, 0.75), (1, 0.75), (2, 0.75)]}
    assert (success.name, success.train) == ("success", [(1, 0.5), (2, 0.5)])
    assert success.evals == {"essays": [(0, 0.5), (1, 0.5), (2, 0.5)]}


def test_failed_episodes_do_not_part_success_from_a_reward_of_0_or_1(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.on_eval(0, "game", {"reward/mean": 0.75, "success": 0.6, "episodes": 10, "failed": 2})  # 6 of 8, and of 10
    log.close()
    assert len(read_curve(tmp_path / "metrics.jsonl").panels) == 1


@pytest.mark.slow
def test_the_picture_has_axes_for_reward_and_for_success(tmp_path: Path, monkeypatch):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, path, **_: (drawn.append(self), Path(path).write_bytes(b""))
    )
    draw_curve(read_curve(log_of(tmp_path, reward=0.75)), tmp_path / "curve.png", best_constant={"essays": 0.25})
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn[0].axes]
    assert labels == [
        ["training reward", "essays: reward"],
        ["training success", "essays: success", "essays: best constant policy, 0.25"],
    ]
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["reward", "success"]


@pytest.mark.parametrize("curve", [Curve(), Curve(evals={"e": [(0, 0.5)]}), Curve(rewards=[(1, math.nan)])])
def test_a_short_run_is_drawn_too(curve: Curve, tmp_path: Path):
    draw_curve(curve, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_the_monitor_draws_after_each_evaluation(metrics: Path, tmp_path: Path):
    monitor = LearningCurve(metrics, tmp_path / "curve.png")
    monitor.on_step(1, {})
    assert not (tmp_path / "curve.png").exists()
    monitor.on_eval(2, "guess", {})
    assert (tmp_path / "curve.png").exists()


def test_without_matplotlib_it_says_what_to_type(metrics: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[plot\]'"):
        draw_curve(Curve(), tmp_path / "curve.png")
    with caplog.at_level(logging.WARNING):
        monitor = LearningCurve(metrics, tmp_path / "curve.png")
        monitor.on_eval(2, "guess", {})
    assert "no curve.png for this run: matplotlib is not installed; type: pip install" in caplog.text
    assert not (tmp_path / "curve.png").exists()
