"""Writes a run as TensorBoard event files: metrics, histograms, configuration, sample trajectories, alarms."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.core.errors import UsageError
from verbatim.core.imports import is_installed
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.background import Background
from verbatim.logs.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor, RunInfo
from verbatim.logs.monitors.metric_table import about
from verbatim.logs.monitors.samples import COLUMNS, SampleRow, SampleRule
from verbatim.logs.monitors.values import finite, flat

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)

INSTALL = (
    "[monitor.tensorboard] needs tensorboard, which is not installed; type: pip install 'verbatim-rl[tensorboard]'"
)
FOLDER = "tensorboard"
"""The folder of the run folder that the files lie in."""


@dataclass(frozen=True, kw_only=True)
class Tensorboard:
    """[monitor.tensorboard]: writes event files into the run folder.

    Raises:
        UsageError: tensorboard is not installed.
    """

    folder: str | None = None
    """Where the event files go; `tensorboard` in the run folder by default, so that `tensorboard --logdir runs` shows
    all runs. A folder must not be shared by runs."""
    samples: int = 4
    """Trajectories in the table of a step; 0 = no tables."""
    sample_interval: int = 10
    """Steps between two tables."""

    def __post_init__(self) -> None:
        if not is_installed("tensorboard"):
            raise UsageError(INSTALL)
        SampleRule(count=self.samples, interval=self.sample_interval)  # refuses what makes no sense

    def __call__(self, run: RunInfo) -> TensorboardMonitor:
        return TensorboardMonitor(self, run)


class TensorboardMonitor(Monitor):
    """One folder of event files. Its methods return at once, but for `close`."""

    def __init__(self, settings: Tensorboard, run: RunInfo) -> None:
        self._folder = Path(settings.folder) if settings.folder is not None else run.folder / FOLDER
        self._run = run
        self._samples = SampleRule(count=settings.samples, interval=settings.sample_interval)
        self._described: set[str] = set()
        self._work = Background["EventFileWriter"](
            "TensorBoard",
            open=self._open,
            finish=lambda writer: writer.close(),
            how_to_recover=lambda: f"what is missing in {self._folder} is in {run.folder}/metrics.jsonl",
        )

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """Every metric, and a histogram of each distribution."""
        self._put_scalars(step, metrics)
        at = time.time()

        def write(writer: EventFileWriter) -> None:
            from tensorboard.plugins.histogram.summary_v2 import histogram_pb

            for name, values in distributions.items():
                if len(found := finite(values)):
                    _add(writer, step, at, histogram_pb(name, found))

        self._work.put(write)

    def on_trajectories(self, step: int, fates: Sequence[Fate]) -> None:
        """A table of a few of them, as the text `trajectories`."""
        if rows := self._samples.rows(step, fates):
            self._put_text(step, "trajectories", _table(rows))

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """Every metric, under `eval/{env}/`."""
        self._put_scalars(step, metrics, f"eval/{env}/")

    def on_alarm(self, alarm: Alarm) -> None:
        """`Alarm.metric` is 1 while it is raised; the text of the same name has the words."""
        self._put_scalars(alarm.step, {alarm.metric: float(alarm.state == "raised")})
        self._put_text(alarm.step, f"{alarm.metric}/text", literal(alarm.text))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The results as a text, and the end of the session, which the page HPARAMS shows."""
        state, step = summary["state"], summary["steps"]
        said = json.dumps({"state": state, **summary["results"]}, indent=2, default=str)
        self._put_text(step, "results", literal(said))
        at = time.time()

        def write(writer: EventFileWriter) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.hparams import metadata
            from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
            from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

            status = STATUS_FAILURE if state == "failed" else STATUS_SUCCESS
            told = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=at))
            end = Summary()
            end.value.add(
                tag=metadata.SESSION_END_INFO_TAG,
                metadata=metadata.create_summary_metadata(told),
                tensor=metadata.NULL_TENSOR,
            )
            _add(writer, step, at, end)

        self._work.put(write)

    def close(self) -> None:
        """Wait for the files, at most until the deadlines."""
        self._work.close()

    def _put_scalars(self, step: int, metrics: Metrics, prefix: str = "") -> None:
        at, values = time.time(), dict(metrics)

        def write(writer: EventFileWriter) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb

            everything = Summary()
            for name, value in values.items():
                everything.MergeFrom(scalar_pb(prefix + name, float(value), self._description(prefix, name)))
            _add(writer, step, at, everything)

        self._work.put(write)

    def _put_text(self, step: int, name: str, content: Any) -> None:
        at = time.time()

        def write(writer: EventFileWriter) -> None:
            import numpy as np
            from tensorboard.plugins.text.summary_v2 import text_pb

            _add(writer, step, at, text_pb(name, np.array(content, dtype=object)))

        self._work.put(write)

    def _description(self, prefix: str, name: str) -> str | None:
        """Meaning and unit, for the first value of a metric."""
        metric = None if prefix + name in self._described else about(name)
        self._described.add(prefix + name)
        if metric is None:
            return None
        return f"{metric.about} ({metric.unit})" if metric.unit else metric.about

    # ---- on the thread

    def _open(self) -> EventFileWriter:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        first = self._run.first_step
        cut_events(self._folder, first)
        writer = EventFileWriter(str(self._folder), max_queue_size=100, flush_secs=10)
        # A TensorBoard that is open already forgets the steps that are done again.
        writer.add_event(Event(wall_time=time.time(), step=first + 1, session_log=SessionLog(status=SessionLog.START)))
        config = json.dumps(self._run.config, indent=2, default=str)
        _add(writer, first, time.time(), text_pb("config", literal(config)))
        keys = {name: value for name, value in flat(self._run.config).items() if value is not None}
        _add(writer, first, time.time(), hparams_pb(keys, trial_id=str(self._run.folder.resolve())))
        writer.flush()
        return writer


def _add(writer: EventFileWriter, step: int, at: float, summary: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.add_event(Event(step=step, wall_time=at, summary=summary))


def cut_events(folder: Path, step: int) -> None:
    """Take the events after this step out of the event files of a folder: those steps are done again."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(folder.glob("events.out.tfevents.*")):
        records = list(RawEventFileLoader(str(path)).Load())
        kept = [record for record in records if Event.FromString(record).step <= step]
        if len(kept) == len(records):
            continue
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            writer = RecordWriter(file)
            for record in kept:
                writer.write(record)
        os.replace(temporary, path)


def _table(rows: Sequence[SampleRow]) -> list[list[str]]:
    """A heading, and a row for each trajectory; nothing in it is read as markdown."""
    return [list(COLUMNS), *([literal("" if value is None else str(value)) for value in astuple(row)] for row in rows)]


def literal(text: str) -> str:
    """Markdown that shows this text as it is: an indented block.

    >>> literal("# <b>\\nx")
    '    # <b>\\n    x'
    """
    return "\n".join(f"    {line}" for line in text.splitlines())
