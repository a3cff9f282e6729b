"""Several monitors listen as one, and none of them can stop a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from verbatim import Trajectory
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors import Alarm, MetricsLog, Monitor, Monitors, RunInfo
from verbatim.logs.monitors.monitor import METHODS, NO_DISTRIBUTIONS, Distributions, Metrics, fault_of, open_monitors

ALARM = Alarm(
    name="entropy_collapse",
    step=3,
    state="raised",
    message="entropy is 0.1",
    cause="lr too high",
    advice="lower trainer.optim.lr",
    evidence={"entropy": 0.1},
)


class Recording:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self.seen.append((step, dict(metrics)))

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self.seen.append((step, env, dict(metrics)))

    def close(self) -> None:
        self.seen.append("closed")


class Broken(Recording):
    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        raise OSError("disk full")


def test_every_monitor_hears_everything():
    first, second = Recording(), Recording()
    monitors: Monitor = Monitors([first, second])
    monitors.on_step(1, {"x": 1.0})
    monitors.on_eval(1, "env", {"y": 2.0})
    monitors.close()
    assert first.seen == second.seen == [(1, {"x": 1.0}), (1, "env", {"y": 2.0}), "closed"]


def test_a_monitor_that_raises_is_reported_and_the_others_still_hear(caplog: pytest.LogCaptureFixture):
    after = Recording()
    monitors = Monitors([Broken(), after])
    with caplog.at_level(logging.ERROR):
        monitors.on_step(1, {"x": 1.0})
    assert after.seen == [(1, {"x": 1.0})]
    assert monitors.num_failures == 1
    assert "monitor Broken failed; the run goes on" in caplog.text
    assert "OSError: disk full" in caplog.text


def test_ctrl_c_inside_a_monitor_still_stops_the_run():
    class Interrupted(Recording):
        def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Monitors([Interrupted()]).on_step(1, {})


def test_metrics_are_one_line_per_step_and_per_evaluation(tmp_path: Path):
    ticks = iter([1000.5, 1002.0])
    log = MetricsLog(tmp_path / "metrics.jsonl", now=lambda: next(ticks))
    log.on_eval(0, "env", {"success": 0.25})
    log.on_step(1, {"reward/mean": 0.5})
    log.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"format": 1, "step": 0, "kind": "eval", "time": 1000.5, "env": "env", "metrics": {"success": 0.25}},
        {"format": 1, "step": 1, "kind": "train", "time": 1002.0, "metrics": {"reward/mean": 0.5}},
    ]


def test_a_monitor_with_an_async_method_is_reported_not_left_unawaited(caplog, recwarn):
    class Unawaited(Monitor):
        async def on_step(self, step, metrics, distributions):
            raise AssertionError("never awaited")

    monitors = Monitors([Unawaited()])
    monitors.on_step(1, {})
    assert monitors.num_failures == 1
    assert "Unawaited.on_step is async and has not run" in caplog.text
    assert not recwarn.list


# ---- the methods


class OnlyEvaluations:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self.seen.append((step, env))


def test_a_monitor_may_leave_out_methods():
    heard = OnlyEvaluations()
    monitors = Monitors([heard])
    monitors.on_start({"max_steps": 2})
    monitors.on_step(1, {})
    monitors.on_trajectories(1, [])
    monitors.on_eval(1, "game", {})
    monitors.on_alarm(ALARM)
    monitors.on_end({"state": "finished"})
    monitors.close()
    assert (heard.seen, monitors.num_failures) == ([(1, "game")], 0)


def test_every_method_is_called_with_what_it_is_told():
    told: list[tuple[object, ...]] = []

    def method(name: str):
        return lambda self, *arguments: told.append((name, *arguments))

    monitors = Monitors([type("All", (), {name: method(name) for name in METHODS})()])
    outcomes = [TrajectoryOutcome(trajectory=Trajectory(example_id="x"), turns=())]
    monitors.on_start({"seed": 1})
    monitors.on_step(1, {"x": 1.0}, {"d": [2.0]})
    monitors.on_trajectories(1, outcomes)
    monitors.on_eval(1, "game", {"y": 2.0})
    monitors.on_alarm(ALARM)
    monitors.on_end({"state": "failed"})
    monitors.close()
    assert told == [
        ("on_start", {"seed": 1}),
        ("on_step", 1, {"x": 1.0}, {"d": [2.0]}),
        ("on_trajectories", 1, outcomes),
        ("on_eval", 1, "game", {"y": 2.0}),
        ("on_alarm", ALARM),
        ("on_end", {"state": "failed"}),
        ("close",),
    ]


def made_of(**attributes: object) -> object:
    return type("Mine", (), attributes)()


async def unawaited(self, *arguments: object) -> None: ...


@pytest.mark.parametrize(
    ("monitor", "fault"),
    [
        (
            made_of(on_stepp=print),
            "has a method on_stepp, which is never called; expected some of on_start, on_step, "
            "on_trajectories, on_eval, on_alarm, on_end, close",
        ),
        (made_of(on_step=print, on_train_end=print), "has a method on_train_end, which is never called"),
        (made_of(), "has none of a monitor's methods; expected some of on_start"),
        (print, "has none of a monitor's methods"),
        (made_of(on_step=print, close=7), "has close = 7; expected a method"),
        (made_of(on_end=unawaited), "has an async method; expected plain functions"),
    ],
)
def test_what_would_hear_nothing_is_no_monitor(monitor: object, fault: str):
    assert str(fault_of(monitor)).startswith(fault)


def test_one_method_makes_a_monitor():
    assert [fault_of(made_of(**{name: print})) for name in METHODS] == [None] * 7


def test_what_a_component_gives_is_refused_if_it_is_no_monitor(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    about = RunInfo(name="x", folder=tmp_path, config={})
    good = Recording()
    components = {"typo": lambda run: made_of(on_stop=print), "good": lambda run: good}
    assert open_monitors(components, about) == [good]
    assert "monitor typo could not be started" in caplog.text
    assert "Mine has a method on_stop, which is never called; expected some of" in caplog.text
