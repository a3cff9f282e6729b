"""Logs a run to Weights & Biases: configuration, metrics, histograms, sample trajectories, alarms and the summary.

Calls return immediately, because a thread of `Background` talks to the service. If the record cannot be opened online,
the run is recorded offline in the run folder, for `wandb sync`.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from verbatim.core.disk import write_file
from verbatim.core.errors import UsageError
from verbatim.logs.monitors import background
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.background import reason, warn
from verbatim.logs.monitors.monitor import Distributions, Metrics, RunInfo
from verbatim.logs.monitors.samples import COLUMNS, SampleRow
from verbatim.logs.monitors.service import ServiceMonitor, ServiceSettings, known_id
from verbatim.logs.monitors.values import finite

logger = logging.getLogger(__name__)

RUN_ID = "wandb_run_id"
"""File in the run folder with the id of the W&B record, so that a resumed run continues the same W&B record."""
_NOT_IN_PROJECTS = "/\\#?%:"
"""Characters that W&B does not allow in project names."""
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
"""The modes of wandb. "dryrun" and "run" are older names for offline and online."""
MAX_BINS = 64
"""Maximum number of bins in a histogram."""


@dataclass(frozen=True, kw_only=True)
class Wandb(ServiceSettings):
    """[monitor.wandb]: opens a record of the run at Weights & Biases.

    The wandb package itself finds the API key, from `wandb login` or the environment variable WANDB_API_KEY.

    Raises:
        UsageError: wandb is not installed, or does not accept the project, a tag or the mode.
    """

    package: ClassVar[str] = "wandb"
    project: str
    """The project. It is created if it does not exist."""
    name: str | None = None
    """The record's name; by default the name of the run."""
    tags: tuple[str, ...] = ()
    """Labels for filtering."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """With "offline", the run is recorded in the run folder, for `wandb sync`. By default the value of WANDB_MODE, or
    else "online"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.project.strip() or len(self.project) > 128 or set(self.project) & set(_NOT_IN_PROJECTS):
            raise UsageError(
                f"[monitor.wandb] project = {self.project!r}; expected 1 to 128 characters without any of "
                f"{' '.join(_NOT_IN_PROJECTS)}. The environment variable WANDB_ENTITY sets the project's owner"
            )
        wrong = next((tag for tag in self.tags if not 1 <= len(tag) <= 64), None)
        if wrong is not None:
            raise UsageError(f"[monitor.wandb] tags: found {wrong!r}; expected 1 to 64 characters")
        chosen = os.environ.get("WANDB_MODE")
        if self.mode is None and chosen and chosen not in _MODES:
            raise UsageError(
                f"WANDB_MODE is {chosen!r}; expected {', '.join(_MODES)}; unset it, or give [monitor.wandb] a mode"
            )

    def __call__(self, run: RunInfo) -> WandbMonitor:
        return WandbMonitor(self, run)


class WandbMonitor(ServiceMonitor[Any]):
    """Writes one W&B record: all metrics, a histogram of each distribution, and tables of trajectories."""

    service = "W&B"

    def __init__(self, settings: Wandb, run: RunInfo) -> None:
        self._settings = settings
        super().__init__(settings, run)

    def _log_metrics(
        self, record: Any, at: float, step: int, prefix: str, metrics: Metrics, distributions: Distributions
    ) -> None:
        import wandb

        bins = {name: found for name, values in distributions.items() if (found := _histogram(values)) is not None}
        histograms = {name: wandb.Histogram(np_histogram=found) for name, found in bins.items()}
        record.log({**{f"{prefix}{name}": value for name, value in metrics.items()}, **histograms}, step=step)

    def _log_table(self, record: Any, at: float, step: int, rows: Sequence[SampleRow]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
        record.log({"trajectories": table}, step=step)

    def _log_alarm(self, record: Any, at: float, alarm: Alarm) -> None:
        """Log the alarm's metric. Its text goes into the summary, and into an alert, which W&B delivers according to
        the user's settings."""
        record.log({alarm.metric: float(alarm.state == "raised")}, step=alarm.step)
        record.summary.update({alarm.metric.replace("alarm/", "alarm_message/", 1): alarm.text})
        if alarm.state == "raised":
            record.alert(title=f"{alarm.name} at step {alarm.step}", text=alarm.text, level="WARN")

    def _log_end(self, record: Any, at: float, summary: Mapping[str, Any]) -> None:
        """Write the run's state and final results into the summary."""
        results = {f"results/{name}": value for name, value in summary["results"].items()}
        record.summary.update({"state": summary["state"], **results})

    def _finish(self, record: Any) -> None:
        record.finish(exit_code=int(self._state == "failed"))

    def _open(self) -> Any:
        began = time.monotonic()
        # wandb's own error reports contain exception texts, and delay the end of the process if the service hangs.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # imported here, on the thread, because it takes seconds

        wandb.setup(wandb.Settings(silent=True))  # otherwise wandb prompts for a missing key on the terminal
        mode = self._settings.mode or os.environ.get("WANDB_MODE") or "online"
        try:
            run = self._init(wandb, mode)
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown()  # wandb's service process still holds the id, so a second init would fail
            mode = "offline"
            run = self._init(wandb, mode)
            warn("W&B", f"the service cannot be used ({reason(error)}); {self._how_to_recover()}")
        # run.url is not read when offline, because wandb would warn.
        where = run.url if mode == "online" else f"recorded in {run.dir}" if mode == "offline" else mode
        logger.info("W&B: %s, opened in %.0f s", where, time.monotonic() - began)
        return run

    def _init(self, wandb: Any, mode: str) -> Any:
        return wandb.init(
            project=self._settings.project,
            name=self._settings.name or self._run.name,
            tags=list(self._settings.tags),
            config=dict(self._run.config),
            dir=str(self._run.folder.resolve()),
            id=_run_id(self._run.folder / RUN_ID),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                console="off",  # the output of the run may contain anything, including secrets
                init_timeout=background.OPEN_SECONDS,
                finish_timeout=background.FINISH_SECONDS,
                finish_timeout_raises=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,  # the metadata has the command line, whose overrides may contain API keys
            ),
        )

    def _how_to_recover(self) -> str:
        return f"type `wandb sync {self._run.folder}/wandb/*run-*` to upload the data that was recorded there"


def _histogram(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
    """The counts and the bin edges of a histogram, with one bin per integer if all values are integers; None if there
    are no values.

    >>> [array.tolist() for array in _histogram([0, 2, 2])]
    [[1, 0, 2], [-0.5, 0.5, 1.5, 2.5]]
    """
    known = finite(values)
    if not known.size:
        return None
    low, high = known.min(), known.max()
    is_whole = high - low < MAX_BINS and (known == np.round(known)).all()
    return np.histogram(known, bins=np.arange(low - 0.5, high + 1) if is_whole else MAX_BINS)


def _run_id(path: Path) -> str:
    """The id of the run's record, read from the file. If the file does not exist yet or is damaged, a new id is created
    and stored."""
    if (found := known_id(path)) is None:
        found = uuid.uuid4().hex[:12]
        write_file(path, found.encode())
    return found
