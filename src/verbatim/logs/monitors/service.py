"""What the monitors of services have in common: parameters, a thread that talks to the service, and the record's id."""

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
    """The parameters of every service.

    Raises:
        UsageError: its package is not installed, or a parameter has a value that makes no sense.
    """

    package: ClassVar[str]
    """What is imported, and the extra that installs it; the settings are those of [monitor.PACKAGE]."""
    samples: int = 4
    """Trajectories in the table of a step; 0: no tables."""
    sample_interval: int = 10
    """Steps between two tables."""

    def __post_init__(self) -> None:
        refuse_without(self.package, extra=self.package, what=f"[monitor.{self.package}]")
        if self.samples < 0 or self.sample_interval < 1:
            raise UsageError(
                f"found samples = {self.samples} and sample_interval = {self.sample_interval}; expected at least 0 "
                "and at least 1"
            )


class ServiceMonitor(Monitor, Generic[Handle]):
    """Reports a run to a service. Its methods return at once, but for `close`, which waits for what is not delivered
    yet, at most until the deadlines.

    What a service does itself is called on the thread of `Background`, with the open record, and with the time at which
    the run reported it, in seconds since 1970. The thread starts with the constructor.
    """

    service: ClassVar[str]
    """Its name, in front of warnings."""
    retry_seconds: ClassVar[float | None] = None
    """As for `Background`."""

    def __init__(self, settings: ServiceSettings, run: RunInfo) -> None:
        self._run, self._tables = run, settings
        self._state = "stopped"
        """How the run ended, as `on_end` has it."""
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
        return f"what is missing there is in {self._run.folder}/metrics.jsonl"

    # ---- on the thread

    @abstractmethod
    def _open(self) -> Handle:
        """The open record."""

    @abstractmethod
    def _finish(self, record: Handle) -> object:
        """End it."""

    @abstractmethod
    def _log_metrics(
        self, record: Handle, at: float, step: int, prefix: str, metrics: Metrics, distributions: Distributions
    ) -> None:
        """Each metric, the prefix in front of its name, and what the service shows of each distribution."""

    @abstractmethod
    def _log_table(self, record: Handle, at: float, step: int, rows: Sequence[SampleRow]) -> None:
        """A table of some of the step's trajectories."""

    @abstractmethod
    def _log_alarm(self, record: Handle, at: float, alarm: Alarm) -> None:
        """`Alarm.metric`, which is 1 while it is raised, and the words."""

    @abstractmethod
    def _log_end(self, record: Handle, at: float, summary: Mapping[str, Any]) -> None:
        """The results, and how the run ended."""


def known_id(path: Path) -> str | None:
    """The id in a file of the run folder, under which a resumed run goes on; None where there is none, or the file is
    damaged."""
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    return found if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found) else None
