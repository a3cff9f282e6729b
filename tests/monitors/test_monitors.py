"""Several monitors listen as one, and none of them can stop a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from verbatim.monitors import MetricsLog, Monitor, Monitors
from verbatim.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics


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
        {"step": 0, "kind": "eval", "time": 1000.5, "env": "env", "metrics": {"success": 0.25}},
        {"step": 1, "kind": "train", "time": 1002.0, "metrics": {"reward/mean": 0.5}},
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
