"""Code shared by monitors that report to an external service: parameters, a thread for the service, and the record's
id."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.background import Background, Handle
from verbatim.logs.monitors.monitor import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor, RunInfo
from verbatim.logs.monitors.samples import SampleRow, sample_rows


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Parameters that all services have.

    Raises:
        UsageError: the service's package is not installed, or a parameter is out of range.
    """

    package: ClassVar[str]
    """Name of the service's Python package, of the extra that installs it, and of the table [monitor.PACKAGE]."""
    samples: int = 4
    """Number of trajectories in a step's table; 0 for no tables."""
    sample_interval: int = 10
    """Number of steps between two tables."""

    def __post_init__(self) -> None:
        refuse_without(self.package, extra=self.package, what=f"[monitor.{self.package}]")
        if self.samples < 0 or self.sample_interval < 1:
            raise UsageError(
                f"found samples = {self.samples} and sample_interval = {self.sample_interval}; expected at least 0 "
                "and at least 1"
            )


class ServiceMonitor(Monitor, Generic[Handle]):
    """Reports a run to a service. The methods return immediately, except `close`, which waits until all reports are
    sent or the timeouts are reached.

    Subclasses implement the abstract methods. The thread of `Background` calls these methods with the open record and
    the time of the report in seconds since 1970. The constructor of `ServiceMonitor` starts the thread, so a subclass
    has to set its own attributes before it calls that constructor.
    """

    service: ClassVar[str]
    """Name of the service, used as the prefix of warnings."""
    retry_seconds: ClassVar[float | None] = None
    """The `retry_seconds` of `Background`."""

    def __init__(self, settings: ServiceSettings, run: RunInfo) -> None:
        self._run, self._tables = run, settings
        self._state = "stopped"
        """The state in which the run ended, from `on_end`."""
        self._work = Background[Handle](
            self.service,
            open=self._open,
            finish=self._finish,
            how_to_recover=self._how_to_recover,
            retry_seconds=self.retry_seconds,
        )

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self._put(self._log_metrics, step, "", dict(metrics), distributions)

    def on_trajectories(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        asked = self._tables
        if rows := sample_rows(step, outcomes, count=asked.samples, interval=asked.sample_interval):
            self._put(self._log_table, step, rows)

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self._put(self._log_metrics, step, f"eval/{env}/", dict(metrics), NO_DISTRIBUTIONS)

    def on_alarm(self, alarm: Alarm) -> None:
        self._put(self._log_alarm, alarm)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._state = summary["state"]
        self._put(self._log_end, summary)

    def close(self) -> None:
        self._work.close()

    def _put(self, log: Callable[..., object], *what: object) -> None:
        at = time.time()
        self._work.put(lambda record: log(record, at, *what))

    def _how_to_recover(self) -> str:
        return f"the missing metrics are in {self._run.folder}/metrics.jsonl"

    # ---- on the thread

    @abstractmethod
    def _open(self) -> Handle:
        """Open the run's record at the service."""

    @abstractmethod
    def _finish(self, record: Handle) -> object:
        """Close the record."""

    @abstractmethod
    def _log_metrics(
        self, record: Handle, at: float, step: int, prefix: str, metrics: Metrics, distributions: Distributions
    ) -> None:
        """Send metrics, with `prefix` before their names, and distributions, as histograms or quantiles."""

    @abstractmethod
    def _log_table(self, record: Handle, at: float, step: int, rows: Sequence[SampleRow]) -> None:
        """Send a table of some of the step's trajectories."""

    @abstractmethod
    def _log_alarm(self, record: Handle, at: float, alarm: Alarm) -> None:
        """Send the text of an alarm, and its metric `Alarm.metric`, which is 1 while the alarm is raised."""

    @abstractmethod
    def _log_end(self, record: Handle, at: float, summary: Mapping[str, Any]) -> None:
        """Send the final results, and the state in which the run ended."""


def known_id(path: Path) -> str | None:
    """Read the id of the service's record from a file in the run folder, so that a resumed run continues the same
    record; None if there is no such file, or if it is damaged."""
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    return found if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found) else None
