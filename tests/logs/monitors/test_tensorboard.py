"""What TensorBoard reads of a run, with its own reader."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logs.monitors.outcomes_made import HOSTILE, outcome
from verbatim.core.errors import UsageError
from verbatim.logs.monitors import Alarm, RunInfo
from verbatim.logs.monitors.tensorboard import Tensorboard, TensorboardMonitor

CONFIG = {"max_steps": 9, "model": {"name": "m"}, "orchestrator": {"train": {"env": [{"id": "game"}]}}}


def about(folder: Path, first_step: int = 0) -> RunInfo:
    return RunInfo(name="lots", folder=folder, config=CONFIG, first_step=first_step)


def step(monitor: TensorboardMonitor, number: int, **metrics: float) -> None:
    monitor.on_step(number, {"reward/mean": number / 8, **metrics}, {"distribution/turns": [1, 2, 2, math.nan]})


class Read:
    """A folder of event files as TensorBoard shows it."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self._events = EventAccumulator(str(folder), size_guidance={"tensors": 0}, purge_orphaned_data=False)
        self._events.Reload()
        self.tags = set(self._events.Tags()["tensors"])

    def __getitem__(self, tag: str) -> list[tuple[int, Any]]:
        from tensorboard.util.tensor_util import make_ndarray

        return [(event.step, make_ndarray(event.tensor_proto)) for event in self._events.Tensors(tag)]

    def scalars(self, tag: str) -> list[tuple[int, float]]:
        return [(step, float(value)) for step, value in self[tag]]

    def text(self, tag: str) -> str:
        return self[tag][-1][1].item().decode()

    def metadata(self, tag: str) -> Any:
        return self._events.SummaryMetadata(tag)


pytestmark = pytest.mark.extras


def test_metrics_and_evaluations_are_scalars_by_step_with_their_meaning(tmp_path: Path):
    monitor = Tensorboard()(about(tmp_path))
    monitor.on_eval(0, "my/game", {"success": 0.25, "reward/mean": math.nan})
    step(monitor, 1, loss=math.inf)
    step(monitor, 2, loss=0.5)
    monitor.close()
    read = Read(tmp_path / "tensorboard")
    assert read.scalars("reward/mean") == [(1, 0.125), (2, 0.25)]
    assert read.scalars("loss") == [(1, math.inf), (2, 0.5)]
    assert read.scalars("eval/my/game/success") == [(0, 0.25)]
    assert math.isnan(read.scalars("eval/my/game/reward/mean")[0][1])
    assert read.metadata("reward/mean").plugin_data.plugin_name == "scalars"
    assert read.metadata("reward/mean").summary_description == "mean raw reward (reward)"
    assert "reached the goal" in read.metadata("eval/my/game/success").summary_description


def test_histograms_hold_the_finite_values(tmp_path: Path):
    monitor = Tensorboard()(about(tmp_path))
    monitor.on_step(1, {}, {"distribution/turns": [1, 2, 2, math.nan], "distribution/advantage": []})
    monitor.close()
    read = Read(tmp_path / "tensorboard")
    ((number, buckets),) = read["distribution/turns"]  # rows of left edge, right edge, count
    assert (number, buckets[:, 2].sum(), buckets[0, 0], buckets[-1, 1]) == (1, 3, 1, 2)
    assert (buckets[0, 2], buckets[-1, 2]) == (1, 2)
    assert "distribution/advantage" not in read.tags


def test_the_configuration_and_the_results_are_texts_and_hyperparameters(tmp_path: Path):
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS

    monitor = Tensorboard()(about(tmp_path))
    step(monitor, 1)
    monitor.on_end({"state": "finished", "steps": 1, "results": {"gain": 0.5}})
    monitor.close()
    read = Read(tmp_path / "tensorboard")
    assert json.loads(read.text("config")) == CONFIG
    assert json.loads(read.text("results")) == {"state": "finished", "gain": 0.5}
    start = metadata.parse_session_start_info_plugin_data(
        read.metadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    )
    assert {name: value.number_value or value.string_value for name, value in start.hparams.items()} == {
        "max_steps": 9,
        "model.name": "m",
        "orchestrator.train.env.0.id": "game",
    }
    end = metadata.parse_session_end_info_plugin_data(read.metadata(metadata.SESSION_END_INFO_TAG).plugin_data.content)
    assert end.status == STATUS_SUCCESS


def test_sample_trajectories_are_a_table_in_which_nothing_is_markdown(tmp_path: Path):
    monitor = Tensorboard(samples=2)(about(tmp_path))
    for number in (1, 2):
        monitor.on_trajectories(
            number, [outcome("a", 1.0, text=HOSTILE), outcome("b", 0.0, reason="stale"), outcome("c", 0.5)]
        )
    monitor.close()
    ((number, table),) = Read(tmp_path / "tensorboard")["trajectories"]
    heading, first, second = table.tolist()
    assert number == 1
    assert [first[heading.index(name)].strip() for name in (b"trajectory_id", b"reward", b"outcome")] == [
        b"a",
        b"1.0",
        b"trained",
    ]
    assert second[heading.index(b"outcome")].strip() == b"stale"
    conversation = first[heading.index(b"conversation")].decode()
    assert all(line.startswith("    ") for line in conversation.splitlines())
    assert "<script>" in conversation and "\\x1b[31mred" in conversation
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    shown = text_array_to_html(table, enable_markdown=True)
    assert "<script" not in shown and "href" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:alert(1))" in shown


def test_an_alarm_is_a_scalar_and_a_text(tmp_path: Path):
    monitor = Tensorboard()(about(tmp_path))
    raised = Alarm(name="stale", step=3, state="raised", message="Too old", cause="slow", advice="wait")
    monitor.on_alarm(raised)
    monitor.on_alarm(Alarm(name="stale", step=5, state="cleared", message="Too old", cause="", advice=""))
    monitor.on_alarm(replace(raised, env="game"))  # of an environment it is one of its own
    monitor.close()
    read = Read(tmp_path / "tensorboard")
    assert read.scalars("alarm/stale/game") == [(3, 1.0)]
    assert read.scalars("alarm/stale") == [(3, 1.0), (5, 0.0)]
    assert read["alarm/stale/text"][0][1].item() == b"    Too old. Cause: slow. To do: wait."


def test_a_resumed_run_has_no_step_twice_and_keeps_what_came_before(tmp_path: Path):
    """Killed after step 4, resumed from the checkpoint of step 2: the files themselves forget steps 3 and 4."""
    killed = Tensorboard()(about(tmp_path))
    for number in (1, 2, 3, 4):
        step(killed, number, loss=number)
        killed.on_eval(number, "game", {"success": number / 8})
    killed.on_alarm(Alarm(name="stale", step=4, state="raised", message="", cause="", advice=""))
    killed.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-20])  # its last record was not written to its end
    resumed = Tensorboard()(about(tmp_path, first_step=2))
    for number in (3, 4, 5):
        step(resumed, number, loss=10 * number)
        resumed.on_eval(number, "game", {"success": 1.0})
    resumed.close()
    read = Read(tmp_path / "tensorboard")
    assert read.scalars("loss") == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert read.scalars("eval/game/success") == [(1, 0.125), (2, 0.25), (3, 1), (4, 1), (5, 1)]
    assert [number for number, _ in read["distribution/turns"]] == [1, 2, 3, 4, 5]
    assert "alarm/stale" not in read.tags


def test_a_folder_of_ones_own_is_used(tmp_path: Path):
    monitor = Tensorboard(folder=str(tmp_path / "elsewhere"))(about(tmp_path / "run"))
    step(monitor, 1)
    monitor.close()
    assert Read(tmp_path / "elsewhere").scalars("reward/mean") == [(1, 0.125)]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "tensorboard").write_text("a file")
    monitor = Tensorboard()(about(tmp_path))
    step(monitor, 1)
    monitor.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("TensorBoard: the record could not be opened, and the run goes on without it: ")


def test_without_the_package_the_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[tensorboard\]'"):
        Tensorboard()
