"""A run with W&B, TensorBoard and MLflow at once, recorded by the real packages without a network, and read back."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, train_lines, workplace
from logs.monitors.test_mlflow import Read as ReadMlflow
from logs.monitors.test_tensorboard import Read as ReadTensorboard
from logs.monitors.wandb_file import WandbRecord, read_wandb_file
from ports import held_port, number_of
from verbatim.cli.main import main
from waiting import wait_until

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.realtime]

KEY = "hf_abcdefghijklmnopqrstuv"

EVERY_OTHER = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class EveryOther:
    """Drops the second and the fourth of a group."""

    action: str = "drop"

    def __call__(self, trajectory):
        return trajectory.sample_index % 2 == 1
'''

MONITOR = f"""\
import_path = "lots.Lots"
[[orchestrator.filters]]
type = "custom"
import_path = "every_other.EveryOther"
[orchestrator.eval]
episodes = 5
[[orchestrator.eval.env]]
import_path = "lots.Lots"
name = "held-out"
args = {{{{ delay = 0.0 }}}}
[monitor.wandb]
project = "lots-of-lots"
tags = ["tiny"]
[monitor.tensorboard]
sample_interval = 2
[monitor.mlflow]
experiment = "lots"
tracking_uri = "sqlite:///mlflow.db"
[monitor.mine]
type = "custom"
import_path = "broken_monitor.open_it"
kwargs = {{{{ api_key = "{KEY}" }}}}
"""

BROKEN = """
class Broken:
    def on_step(self, step, metrics, distributions):
        raise OSError("disk full")
    on_eval = on_step
    def close(self):
        raise OSError("disk full")

def open_it(run, *, api_key):
    return Broken()
"""


@dataclass
class Recorded:
    """A run of two steps, resumed for a third."""

    folder: Path
    model: Path
    metrics: dict[int, dict[str, float]]
    first: WandbRecord
    second: WandbRecord
    tensorboard: ReadTensorboard
    mlflow: ReadMlflow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Iterator[Recorded]:
    place = tmp_path_factory.mktemp("wandb")
    model = build_tiny_model(place / "model")
    modules = {"lots": LOTS, "every_other": EVERY_OTHER, "broken_monitor": BROKEN}
    with pytest.MonkeyPatch.context() as patch, workplace(place / "here", modules) as here:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_RUN_ID"):
            patch.delenv(name, raising=False)
        (here / "run.toml").write_text("keys_in_config = true\n" + TOML.format(model=model) + MONITOR.format())
        with contextlib.redirect_stdout(None):
            assert main(["rl", "run.toml", "--run-dir", "run"]) == 0
            assert main(["rl", "run.toml", "--resume", "run", "--max-steps", "3"]) == 0
        run = here / "run"
        first, second = (finished_record(path) for path in records(run))
        metrics = {line["step"]: line["metrics"] for line in train_lines(run)}
        yield Recorded(
            folder=run,
            model=model,
            metrics=metrics,
            first=first,
            second=second,
            tensorboard=ReadTensorboard(run / "tensorboard"),
            mlflow=ReadMlflow("sqlite:///mlflow.db", run),
        )


def records(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)


def finished_record(path: Path) -> WandbRecord:
    """wandb's own process writes the file, and its end a moment after the run's."""
    wait_until(lambda: read_wandb_file(path).is_finished)
    return read_wandb_file(path)


def test_a_resumed_run_goes_on_in_its_own_record(recorded: Recorded):
    first, second = recorded.first, recorded.second
    assert first.run_id == second.run_id == (recorded.folder / "wandb_run_id").read_text()
    assert (first.project, first.name, first.tags) == ("lots-of-lots", "run", ["tiny"])
    assert set(first.history) == {0, 1, 2}
    assert set(second.history) == {3}


def test_the_configuration_is_recorded(recorded: Recorded):
    config = recorded.first.config
    assert config["orchestrator"]["batch_size"] == 8
    assert config["model"]["name"] == str(recorded.model)
    assert config["monitor"]["mine"]["kwargs"] == {"api_key": "[redacted]"}
    assert (config["max_steps"], recorded.second.config["max_steps"]) == (2, 3)


def test_every_metric_is_recorded_by_step(recorded: Recorded):
    history = {**recorded.first.history, **recorded.second.history}
    assert "eval/held-out/reward/mean" in history[0]
    assert set(recorded.metrics) == {1, 2, 3}
    for step, metrics in recorded.metrics.items():
        for name, value in metrics.items():
            expected, found = float(value), float(history[step][name])
            assert found == expected or (math.isnan(found) and math.isnan(expected)), (step, name)


def test_dropped_rollouts_are_in_the_histograms(recorded: Recorded):
    history = {**recorded.first.history, **recorded.second.history}
    for step in (1, 2, 3):
        assert recorded.metrics[step]["filters/EveryOther/dropped"] == 4
        for name in ("reward", "advantage", "completion_tokens", "turns", "staleness"):
            histogram = history[step][f"distribution/{name}"]
            assert histogram["_type"] == "histogram"
            assert sum(histogram["values"]) == 8, (step, name)
    assert history[1]["distribution/turns"] == {"_type": "histogram", "values": [8], "bins": [0.5, 1.5]}


def same(found: float, expected: object) -> bool:
    """As float32, which TensorBoard has."""
    value = float(expected)  # type: ignore[arg-type]
    return found == pytest.approx(value, rel=1e-6) or (math.isnan(found) and math.isnan(value))


def test_every_service_has_every_metric_of_every_step_once(recorded: Recorded):
    for step, metrics in recorded.metrics.items():
        for name, value in metrics.items():
            for scalars in (recorded.tensorboard.scalars(name), recorded.mlflow[name]):
                (found,) = [number for at, number in scalars if at == step]
                assert same(found, value), (step, name)
    for scalars in (recorded.tensorboard.scalars("eval/held-out/success"), recorded.mlflow["eval/held-out/success"]):
        assert [step for step, _ in scalars] == [0, 2, 3]


def test_every_service_has_sample_trajectories(recorded: Recorded):
    table = recorded.first.history[1]["trajectories"]
    assert (table["_type"], table["nrows"]) == ("table-file", 4)
    assert [step for step, _ in recorded.tensorboard["trajectories"]] == [1, 2]
    assert recorded.mlflow.artifacts("trajectories") == ["trajectories/step-000001.json"]


def test_every_service_knows_the_configuration_and_how_the_run_ended(recorded: Recorded):
    assert recorded.second.exit_code == 0
    assert recorded.second.summary["state"] == "finished"
    assert recorded.second.summary["results/steps"] == 3
    assert '"state": "finished"' in recorded.tensorboard.text("results")
    assert '"batch_size": 8' in recorded.tensorboard.text("config")
    assert recorded.mlflow.run.info.status == "FINISHED"
    assert recorded.mlflow.run.data.params["orchestrator.batch_size"] == "8"
    assert recorded.mlflow["results/steps"] == [(2, 2), (3, 3)]


def test_no_key_is_in_any_file_of_the_record(recorded: Recorded):
    places = (recorded.folder / "wandb", recorded.folder / "tensorboard", recorded.folder.parent / "mlruns")
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    files.append(recorded.folder.parent / "mlflow.db")
    assert set(records(recorded.folder)) <= set(files)
    for path in [*files, *(recorded.folder / "logs").iterdir()]:
        assert KEY.encode() not in path.read_bytes(), path


def test_a_monitor_that_fails_stops_nothing_and_is_reported(recorded: Recorded):
    log = (recorded.folder / "logs" / "orchestrator.log").read_text()
    assert "monitor Broken failed; the run goes on without its report" in log
    assert (recorded.folder / "final").is_dir()


UNREACHABLE = """
import logging, sys, threading
from pathlib import Path
from verbatim.logs.monitors import RunInfo, background, wandb
logging.basicConfig(level=logging.WARNING, format="%(message)s")
background.OPEN_SECONDS = background.FINISH_SECONDS = 1e6

class Limits:
    "The service is asked once the run has made its steps, and given up soon; for the record without it there is time."
    asked, stepped = False, threading.Event()

    @property
    def OPEN_SECONDS(self):
        self.stepped.wait()
        self.asked, was_asked = True, self.asked
        return 300.0 if was_asked else 2.0

    def __getattr__(self, name):
        return getattr(background, name)

wandb.background = Limits()
monitor = wandb.Wandb(project="p", mode="online")(RunInfo(name="n", folder=Path(sys.argv[1]), config={}))
for step in range(5):
    monitor.on_step(step, {"x": 1.0})
Limits.stepped.set()
monitor.close()
"""


def test_a_server_that_cannot_be_reached_leaves_an_offline_record(tmp_path: Path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with held_port() as held:
        address = f"http://127.0.0.1:{number_of(held)}"
        done = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
            env={**inherited, "WANDB_BASE_URL": address, "WANDB_API_KEY": "0123456789" * 4},
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    assert "W&B: the service cannot be used (" in done.stderr
    assert "0123456789" not in done.stderr
    (path,) = records(tmp_path)
    assert set(finished_record(path).history) == {0, 1, 2, 3, 4}
