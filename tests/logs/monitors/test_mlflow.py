"""What MLflow's own client reads of a run in a database, and a server that is not there."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logs.monitors.outcomes_made import outcome
from verbatim.core.errors import UsageError
from verbatim.logs.monitors import Alarm, AlarmLog, RunInfo
from verbatim.logs.monitors.mlflow import RUN_ID, Mlflow, MlflowMonitor
from waiting import HANGS

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.realtime]

CONFIG = {"max_steps": 9, "model": {"name": "m"}, "name": None, "orchestrator": {"train": {"env": [{"id": "game"}]}}}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database; files go beside it."""
    place = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield f"sqlite:///{place}/mlflow.db"


def opened(uri: str, folder: Path, first_step: int = 0, **settings: Any) -> MlflowMonitor:
    folder.mkdir(exist_ok=True)
    run = RunInfo(name="lots", folder=folder, config={**CONFIG, "max_steps": 9 + first_step}, first_step=first_step)
    return Mlflow(experiment="games", tracking_uri=uri, **settings)(run)


class Read:
    """The run of a folder as MLflow has it."""

    def __init__(self, uri: str, folder: Path) -> None:
        from mlflow import MlflowClient

        self._client, self.run_id = MlflowClient(tracking_uri=uri), (folder / RUN_ID).read_text()
        self.run = self._client.get_run(self.run_id)
        self.experiment = self._client.get_experiment(self.run.info.experiment_id).name

    def __getitem__(self, name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in self._client.get_metric_history(self.run_id, name)]

    def artifacts(self, path: str | None = None) -> list[str]:
        return [found.path for found in self._client.list_artifacts(self.run_id, path)]

    def text(self, path: str) -> str:
        return Path(self._client.download_artifacts(self.run_id, path)).read_text()


def test_a_run_is_recorded_with_everything(uri: str, tmp_path: Path):
    log = AlarmLog(tmp_path / "alarms.jsonl")
    monitor = opened(uri, tmp_path, samples=2)
    monitor.on_eval(0, "my/game (2)", {"success": 0.25, "reward/mean": math.nan})
    for step in (1, 2):
        monitor.on_step(step, {"rollouts": 8, "loss": step / 2}, {"distribution/turns": [0.0, 10.0, math.nan]})
        monitor.on_trajectories(step, [outcome("a", 1.0), outcome("b", 0.5), outcome("c", 0.0, reason="stale")])
    alarm = Alarm(name="stale", step=2, state="raised", message="Too old", cause="slow", advice="wait")
    log.on_alarm(alarm)
    monitor.on_alarm(alarm)
    monitor.on_end({"state": "failed", "steps": 2, "results": {"gain": 0.5, "gain_interval_95": [0, 1]}})
    monitor.close()

    read = Read(uri, tmp_path)
    assert (read.experiment, read.run.info.run_name, read.run.info.status) == ("games", "lots", "FAILED")
    assert read.run.data.params == {"max_steps": "9", "model.name": "m", "orchestrator.train.env.0.id": "game"}
    assert json.loads(read.text("config.json")) == CONFIG
    assert read["loss"] == [(1, 0.5), (2, 1.0)]
    assert read["eval/my/game _2_/success"] == [(0, 0.25)]
    assert math.isnan(read["eval/my/game _2_/reward/mean"][0][1])
    quantiles = {name: read[f"distribution/turns/{name}"][0] for name in ("min", "p10", "p50", "p90", "max")}
    assert quantiles == {"min": (1, 0), "p10": (1, 1), "p50": (1, 5), "p90": (1, 9), "max": (1, 10)}
    assert read["alarm/stale"] == [(2, 1.0)]
    assert read.run.data.tags["alarm.stale"] == "Too old. Cause: slow. To do: wait."
    assert json.loads(read.text("alarms.jsonl"))["name"] == "stale"
    assert read["results/gain"] == [(2, 0.5)]
    assert read.artifacts("trajectories") == ["trajectories/step-000001.json"]
    table = json.loads(read.text("trajectories/step-000001.json"))
    assert [dict(zip(table["columns"], row, strict=True))["trajectory_id"] for row in table["data"]] == ["a", "c"]
    assert json.loads(read.run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "trajectories/step-000001.json", "type": "table"}
    ]


def test_the_library_reads_a_table_back(uri: str, tmp_path: Path):
    import mlflow

    monitor = opened(uri, tmp_path)
    monitor.on_trajectories(1, [outcome("a", 1.0)])
    monitor.close()
    mlflow.set_tracking_uri(uri)
    run = Read(uri, tmp_path).run.info
    table = mlflow.MlflowClient().load_table(run.experiment_id, "trajectories/step-000001.json", [run.run_id])
    assert table["trajectory_id"].tolist() == ["a"] and table["reward"].tolist() == [1.0]


def test_a_resumed_run_goes_on_in_its_own_record_with_no_step_twice(uri: str, tmp_path: Path):
    """Killed after step 4, resumed from the checkpoint of step 2: MLflow keeps what it heard of 3 and 4 first."""
    killed = opened(uri, tmp_path)
    for step in (1, 2, 3, 4):
        killed.on_step(step, {"rollouts": 8, "loss": step})
        if step % 2 == 0:
            killed.on_eval(step, "game", {"success": step / 8})
    killed.on_trajectories(1, [outcome("a", 1.0)])
    killed.close()
    first = Read(uri, tmp_path)
    resumed = opened(uri, tmp_path, first_step=2)
    for step in (3, 4, 5, 6):
        resumed.on_step(step, {"rollouts": 8, "loss": 10 * step, "entropy": 1.0})
        if step % 2 == 0:
            resumed.on_eval(step, "game", {"success": 1.0})
            resumed.on_eval(step, "other", {"success": 0.5})
    resumed.on_trajectories(10, [outcome("a", 1.0)])
    resumed.on_end({"state": "finished", "steps": 6, "results": {}})
    resumed.close()
    read = Read(uri, tmp_path)
    assert read.run_id == first.run_id
    assert (first.run.info.status, read.run.info.status) == ("KILLED", "FINISHED")
    assert read["loss"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, 60)]
    assert read["eval/game/success"] == [(2, 0.25), (4, 0.5), (6, 1.0)]
    assert read["eval/other/success"] == [(4, 0.5), (6, 0.5)]
    assert read.run.data.params["max_steps"] == "9"  # MLflow's cannot change
    assert json.loads(read.text("config.json"))["max_steps"] == 11
    assert len(json.loads(read.run.data.tags["mlflow.loggedArtifacts"])) == 2


def test_a_run_that_was_deleted_there_is_opened_anew(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / RUN_ID).write_text("0" * 32)
    monitor = opened(uri, tmp_path)
    monitor.on_step(1, {"loss": 1.0})
    monitor.close()
    assert Read(uri, tmp_path)["loss"] == [(1, 1.0)]
    assert "no longer exists; opening a new one" in caplog.text


def test_a_server_that_is_not_there_slows_nothing_and_tells_no_password(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    told, threads, open_record = threading.Event(), set(), MlflowMonitor._open

    def held(monitor: MlflowMonitor) -> Any:
        threads.add(threading.get_ident())
        assert told.wait(HANGS)
        return open_record(monitor)

    monkeypatch.setattr(MlflowMonitor, "_open", held)
    monitor = opened("http://me:hunter2secret@127.0.0.1:9", tmp_path)  # nothing listens there
    for step in range(5):
        monitor.on_step(step, {"loss": 1.0})
    told.set()  # until here nothing has been opened, nor the package imported
    monitor.close()
    assert threads and threading.get_ident() not in threads
    assert "MLflow: the record could not be opened, and the run goes on without it: " in caplog.text
    assert "hunter2secret" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"experiment": " "}, "experiment = ' '; expected 1 to 500 characters"),
        ({"experiment": "e", "tracking_uri": "runs"}, "MLflow no longer writes to folders .*sqlite:///mlflow.db"),
        ({"experiment": "e", "tracking_uri": "file:///x"}, "MLFLOW_ALLOW_FILE_STORE=true"),
        ({"experiment": "e", "samples": -1}, "found samples = -1"),
    ],
)
def test_what_mlflow_would_not_take_is_refused_before_the_run(settings, says, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(UsageError, match=says):
        Mlflow(**settings)


@pytest.mark.parametrize(
    ("missing", "says"),
    [("mlflow", "needs the package mlflow"), ("sqlalchemy", "a database needs the package sqlalchemy")],
)
def test_without_a_package_the_run_is_refused_before_it_starts(monkeypatch, missing, says):
    monkeypatch.setattr("verbatim.core.imports.is_installed", lambda name: name != missing)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UsageError, match=rf"{says}.*pip install 'verbatim-rl\[mlflow\]'") as refused:
        Mlflow(experiment="e", tracking_uri="postgresql://me:hunter2secret@host/runs")
    assert "hunter2secret" not in str(refused.value)
