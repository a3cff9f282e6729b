"""Writes a run as TensorBoard event files: metrics, histograms, configuration, sample trajectories, alarms."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verbatim.core.disk import replacing
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.metric_table import about
from verbatim.logs.monitors.monitor import NO_DISTRIBUTIONS, Distributions, Metrics, RunInfo
from verbatim.logs.monitors.samples import COLUMNS, SampleRow
from verbatim.logs.monitors.service import ServiceMonitor, ServiceSettings
from verbatim.logs.monitors.values import finite, flat

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""Name of the folder with the event files in the run folder."""


@dataclass(frozen=True, kw_only=True)
class Tensorboard(ServiceSettings):
    """[monitor.tensorboard]: writes event files into the run folder.

    Raises:
        UsageError: tensorboard is not installed.
    """

    package: ClassVar[str] = "tensorboard"
    folder: str | None = None
    """The folder for the event files. By default it is `tensorboard` in the run folder, so that `tensorboard --logdir
    runs` shows all runs. Two runs must not share a folder."""

    def __call__(self, run: RunInfo) -> TensorboardMonitor:
        return TensorboardMonitor(self, run)


class TensorboardMonitor(ServiceMonitor["EventFileWriter"]):
    """Writes event files into one folder: all metrics, a histogram of each distribution, and trajectories as text."""

    service = "TensorBoard"

    def __init__(self, settings: Tensorboard, run: RunInfo) -> None:
        self._folder = Path(settings.folder) if settings.folder is not None else run.folder / FOLDER
        self._described: set[str] = set()
        super().__init__(settings, run)

    def _log_metrics(
        self, record: EventFileWriter, at: float, step: int, prefix: str, metrics: Metrics, distributions: Distributions
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        everything = Summary()
        for name, value in metrics.items():
            everything.MergeFrom(scalar_pb(prefix + name, float(value), self._description(prefix, name)))
        for name, values in distributions.items():
            if len(found := finite(values)):
                everything.MergeFrom(histogram_pb(name, found))
        _add(record, step, at, everything)

    def _log_table(self, record: EventFileWriter, at: float, step: int, rows: Sequence[SampleRow]) -> None:
        shown = [[literal("" if value is None else str(value)) for value in astuple(row)] for row in rows]
        _add_text(record, step, at, "trajectories", [list(COLUMNS), *shown])

    def _log_alarm(self, record: EventFileWriter, at: float, alarm: Alarm) -> None:
        """Write the alarm's metric, and its text under the name of the metric followed by `/text`."""
        self._log_metrics(record, at, alarm.step, "", {alarm.metric: float(alarm.state == "raised")}, NO_DISTRIBUTIONS)
        _add_text(record, alarm.step, at, f"{alarm.metric}/text", literal(alarm.text))

    def _log_end(self, record: EventFileWriter, at: float, summary: Mapping[str, Any]) -> None:
        """Write the final results as text, and the end of the session for TensorBoard's HPARAMS page."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        state, step = summary["state"], summary["steps"]
        results = json.dumps({"state": state, **summary["results"]}, indent=2, default=str)
        _add_text(record, step, at, "results", literal(results))
        status = STATUS_FAILURE if state == "failed" else STATUS_SUCCESS
        plugin_data = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=at))
        end = Summary()
        end.value.add(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(plugin_data),
            tensor=metadata.NULL_TENSOR,
        )
        _add(record, step, at, end)

    def _finish(self, record: EventFileWriter) -> None:
        record.close()

    def _how_to_recover(self) -> str:
        return f"metrics missing from {self._folder} are in {self._run.folder}/metrics.jsonl"

    def _description(self, prefix: str, name: str) -> str | None:
        """A metric's meaning and unit for its first value; None for later values, because TensorBoard only reads the
        first."""
        metric = None if prefix + name in self._described else about(name)
        self._described.add(prefix + name)
        if metric is None:
            return None
        return f"{metric.about} ({metric.unit})" if metric.unit else metric.about

    def _open(self) -> EventFileWriter:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        first = self._run.first_step
        cut_events(self._folder, first)
        writer = EventFileWriter(str(self._folder), max_queue_size=100, flush_secs=10)
        # This event marks the start of a session. A TensorBoard that is open then drops the steps that will be done
        # again.
        writer.add_event(Event(wall_time=time.time(), step=first + 1, session_log=SessionLog(status=SessionLog.START)))
        config = json.dumps(self._run.config, indent=2, default=str)
        _add_text(writer, first, time.time(), "config", literal(config))
        keys = {name: value for name, value in flat(self._run.config).items() if value is not None}
        _add(writer, first, time.time(), hparams_pb(keys, trial_id=str(self._run.folder.resolve())))
        writer.flush()
        return writer


def _add(writer: EventFileWriter, step: int, at: float, summary: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.add_event(Event(step=step, wall_time=at, summary=summary))


def _add_text(writer: EventFileWriter, step: int, at: float, name: str, content: Any) -> None:
    import numpy as np
    from tensorboard.plugins.text.summary_v2 import text_pb

    _add(writer, step, at, text_pb(name, np.array(content, dtype=object)))


def cut_events(folder: Path, step: int) -> None:
    """Remove the events after a step from the event files in a folder, because the later steps will be done again."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(folder.glob("events.out.tfevents.*")):
        records = list(RawEventFileLoader(str(path)).Load())
        kept = [record for record in records if Event.FromString(record).step <= step]
        if len(kept) == len(records):
            continue
        with replacing(path) as temporary, temporary.open("wb") as file:
            writer = RecordWriter(file)
            for record in kept:
                writer.write(record)


def literal(text: str) -> str:
    """Convert text to Markdown that shows the text unchanged, as an indented code block.

    >>> literal("# <b>\\nx")
    '    # <b>\\n    x'
    """
    return "\n".join(f"    {line}" for line in text.splitlines())
