"""Weights & Biases, with a stand-in for the package: whatever it does, the run is neither stopped nor slowed."""

from __future__ import annotations

import logging
import math
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logs.monitors.outcomes_made import outcome
from verbatim.core.errors import UsageError
from verbatim.logs.monitors import Alarm, RunInfo, wandb
from verbatim.logs.monitors.wandb import Wandb
from waiting import wait_until

KEY = "0123456789abcdef0123456789abcdef01234567"


class FakeRun:
    def __init__(self, fake: FakeWandb, settings: dict[str, Any]) -> None:
        self._fake = fake
        self.settings = settings
        self.url = None
        self.dir = "files"
        self.summary = fake.summary

    def log(self, values: dict[str, Any], step: int) -> None:
        self._fake.on_log()
        self._fake.logged.append((step, values))

    def alert(self, **told: str) -> None:
        self._fake.alerts.append(told)

    def finish(self, exit_code: int) -> None:
        self._fake.on_finish()
        self._fake.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """A stand-in for the package; `on_init(mode)`, `on_log()` and `on_finish()` are called where the service is."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(origin="here")  # type: ignore[assignment]  # `find_spec` looks for one
        self.on_init: Callable[[str], None] = lambda mode: None
        self.on_log: Callable[[], None] = lambda: None
        self.on_finish: Callable[[], None] = lambda: None
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.runs: list[dict[str, Any]] = []
        self.alerts: list[dict[str, str]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def setup(self, settings: dict[str, Any]) -> None:
        assert settings == {"silent": True}

    def teardown(self) -> None: ...

    def Histogram(self, np_histogram: tuple[Any, Any]) -> tuple[list[int], list[float]]:
        counts, edges = np_histogram
        return counts.tolist(), edges.tolist()

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, **settings: Any) -> FakeRun:
        self.runs.append(settings)
        self.on_init(settings["mode"])
        return FakeRun(self, settings)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def about(folder: Path) -> RunInfo:
    return RunInfo(name="lots", folder=folder, config={"max_steps": 2, "model": {"name": "x"}})


def test_metrics_evaluations_and_histograms_are_logged_by_step(tmp_path: Path, fake_wandb: FakeWandb):
    monitor = Wandb(project="mine", tags=("a", "b"))(about(tmp_path))
    monitor.on_eval(0, "lots", {"success": 0.25})
    monitor.on_step(
        1,
        {"reward/mean": 0.5},
        {
            "distribution/staleness": [0, 2, 2, 0, 0],
            "distribution/reward": [0.0, 0.5, math.nan, 1.0],
            "distribution/advantage": [],
        },
    )
    monitor.close()
    (first, second) = fake_wandb.logged
    assert first == (0, {"eval/lots/success": 0.25})
    step, values = second
    assert (step, values.pop("reward/mean")) == (1, 0.5)
    assert values.pop("distribution/staleness") == ([3, 0, 2], [-0.5, 0.5, 1.5, 2.5])
    counts, edges = values.pop("distribution/reward")
    assert (len(counts), len(edges), edges[0], edges[-1]) == (64, 65, 0.0, 1.0)
    assert [(i, n) for i, n in enumerate(counts) if n] == [(0, 1), (32, 1), (63, 1)]  # NaN is in no bin
    assert values == {}
    assert fake_wandb.exit_code == 0


def test_the_record_has_the_configuration_and_none_of_the_command_line(tmp_path: Path, fake_wandb: FakeWandb):
    Wandb(project="mine", tags=("a", "b"), mode="offline")(about(tmp_path)).close()
    (run,) = fake_wandb.runs
    assert (run["project"], run["name"], run["tags"], run["mode"]) == ("mine", "lots", ["a", "b"], "offline")
    assert (run["config"], run["dir"]) == ({"max_steps": 2, "model": {"name": "x"}}, str(tmp_path))
    hidden = {"console": "off", "x_disable_meta": True, "disable_git": True, "save_code": False}
    assert hidden.items() <= run["settings"].items()


def test_a_resumed_run_goes_on_under_its_id(tmp_path: Path, fake_wandb: FakeWandb):
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        Wandb(project="mine")(about(folder)).close()
    first, second, other = [(run["id"], run["resume"]) for run in fake_wandb.runs]
    assert first == second != other
    assert first[1] == "allow"


@pytest.mark.parametrize(("env", "mode"), [(None, "online"), ("offline", "offline")])
def test_the_mode_is_the_environments_where_the_file_has_none(
    tmp_path: Path, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, env: str | None, mode: str
):
    if env:
        monkeypatch.setenv("WANDB_MODE", env)
    Wandb(project="mine")(about(tmp_path)).close()
    assert fake_wandb.runs[0]["mode"] == mode


def refuse(*args: str) -> None:
    raise ConnectionError(f"401 for key {KEY}\nmore")


def refuse_online(mode: str) -> None:
    if mode == "online":
        refuse()


def test_a_service_that_cannot_be_reached_is_a_warning_and_an_offline_record(
    tmp_path: Path, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
):
    fake_wandb.on_init = refuse_online
    monitor = Wandb(project="mine")(about(tmp_path))
    monitor.on_step(1, {"x": 1.0})
    monitor.close()
    assert [run["mode"] for run in fake_wandb.runs] == ["online", "offline"]
    assert fake_wandb.logged == [(1, {"x": 1.0})]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "W&B: the service cannot be used (ConnectionError: 401 for key [redacted]); "
        f"type `wandb sync {tmp_path}/wandb/*run-*` to upload the data that was recorded there"
    )


@pytest.mark.realtime
def test_a_service_that_answers_before_its_monitor_is_made_is_the_same_warning(
    tmp_path: Path, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The new thread may run to its end before `Thread.start` returns to the one that began it."""
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        wait_until(lambda: ", opened in " in caplog.text)

    fake_wandb.on_init = refuse_online
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(threading.Thread, "start", start_and_wait)
        monitor = Wandb(project="mine")(about(tmp_path))
    monitor.on_step(1, {"x": 1.0})
    monitor.close()
    assert fake_wandb.logged == [(1, {"x": 1.0})]
    assert "W&B: the service cannot be used (ConnectionError: 401" in caplog.text


def test_a_package_that_fails_altogether_is_one_warning(
    tmp_path: Path, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
):
    fake_wandb.on_init = refuse
    monitor = Wandb(project="mine")(about(tmp_path))
    for step in range(5):
        monitor.on_step(step, {"x": 1.0})
    monitor.close()
    assert fake_wandb.logged == []
    assert KEY not in caplog.text
    assert "the record could not be opened, and the run goes on without it: ConnectionError" in caplog.text


def test_sample_trajectories_are_a_table_of_some_steps(tmp_path: Path, fake_wandb: FakeWandb):
    monitor = Wandb(project="mine", samples=2, sample_interval=3)(about(tmp_path))
    for step in range(1, 5):
        monitor.on_trajectories(step, [outcome(f"{step}-{n}", reward=n / 4) for n in range(4)])
    monitor.close()
    assert [(step, [row["trajectory_id"] for row in values["trajectories"]]) for step, values in fake_wandb.logged] == [
        (1, ["1-3", "1-0"]),
        (3, ["3-3", "3-0"]),
    ]


def test_no_conversation_is_sent_where_samples_is_0(tmp_path: Path, fake_wandb: FakeWandb):
    monitor = Wandb(project="mine", samples=0)(about(tmp_path))
    monitor.on_trajectories(1, [outcome("a", reward=1.0)])
    monitor.close()
    assert fake_wandb.logged == []


def test_an_alarm_is_an_alert_a_metric_and_words_in_the_summary(tmp_path: Path, fake_wandb: FakeWandb):
    monitor = Wandb(project="mine")(about(tmp_path))
    raised = Alarm(
        name="stale",
        step=3,
        state="raised",
        message="Rollouts are 9 steps old",
        cause="slow episodes",
        advice="lower orchestrator.max_async_level",
    )
    monitor.on_alarm(raised)
    words = "Rollouts are 9 steps old. Cause: slow episodes. To do: lower orchestrator.max_async_level."
    monitor.on_alarm(replace(raised, step=5, state="cleared"))
    monitor.close()
    assert fake_wandb.logged == [(3, {"alarm/stale": 1.0}), (5, {"alarm/stale": 0.0})]
    assert fake_wandb.alerts == [{"title": "stale at step 3", "text": words, "level": "WARN"}]
    assert fake_wandb.summary == {"alarm_message/stale": "No longer: Rollouts are 9 steps old"}


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_the_end_is_the_summary_and_the_exit_code(tmp_path: Path, fake_wandb: FakeWandb, state: str, code: int):
    monitor = Wandb(project="mine")(about(tmp_path))
    monitor.on_end({"state": state, "steps": 3, "results": {"gain": 0.5}})
    monitor.close()
    assert fake_wandb.summary == {"state": state, "results/gain": 0.5}
    assert fake_wandb.exit_code == code


def test_without_the_package_the_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[wandb\]'"):
        Wandb(project="mine")


def test_a_folder_that_wandb_left_behind_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(UsageError, match="which is not installed; type: pip install"):
        Wandb(project="demo")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"project": ""}, "project = ''; expected 1 to 128 characters"),
        ({"project": "me/demo"}, "project = 'me/demo'; .*WANDB_ENTITY"),
        ({"project": "x" * 129}, "expected 1 to 128 characters"),
        ({"project": "demo", "tags": ("ok", "")}, "tags: found ''; expected 1 to 64"),
        ({"project": "demo", "samples": -1}, "found samples = -1 and sample_interval = 10; expected at least 0"),
        ({"project": "demo", "tags": ("x" * 65,)}, "tags: found 'x+'; expected 1 to 64"),
    ],
)
def test_what_wandb_would_not_take_is_refused_before_the_run(fake_wandb: FakeWandb, settings, says):
    with pytest.raises(UsageError, match=says):
        Wandb(**settings)


def test_a_misspelt_mode_of_the_environment_is_refused(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(UsageError, match="WANDB_MODE is 'ofline'; expected online, offline, disabled"):
        Wandb(project="demo")
    assert Wandb(project="demo", mode="offline").mode == "offline"


@pytest.mark.parametrize("content", [b"", bytes(12), b"\xff\xfe", b"a b"])
def test_an_id_that_was_not_written_to_its_end_is_made_anew(tmp_path: Path, fake_wandb: FakeWandb, content: bytes):
    (tmp_path / wandb.RUN_ID).write_bytes(content)
    for _ in range(2):
        Wandb(project="mine")(about(tmp_path)).close()
    made, again = (run["id"] for run in fake_wandb.runs)
    assert len(made) == 12 and again == made
