"""Logs configuration, metrics and histograms to Weights & Biases, on a thread that the run never waits for.

```
on_step, on_eval -> a queue of at most 1000 records -> thread: wandb.init, run.log ..., run.finish
```
Whatever the service does is a warning: a record that does not fit into the queue is dropped and counted, `init` and
`finish` have deadlines, and a run that cannot be opened online is recorded offline in the run folder, for `wandb sync`.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verbatim.config.secrets import without_secrets
from verbatim.disk import write_file
from verbatim.errors import UsageError
from verbatim.imports import is_installed
from verbatim.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor, RunInfo

logger = logging.getLogger(__name__)

INSTALL = "[monitor.wandb] needs wandb, which is not installed; type: pip install 'verbatim-rl[wandb]'"
RUN_ID = "wandb_run_id"
"""The file of the run folder that holds the id under which a resumed run goes on."""
MAX_RECORDS = 1000
"""Steps and evaluations that wait for the service; further ones are dropped."""
INIT_SECONDS = 30.0
"""Until a service that does not answer is given up, and the record is an offline one."""
FINISH_SECONDS = 30.0
"""For the upload of what is left when the run is over."""
_NOT_IN_PROJECTS = "/\\#?%:"
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
"""What wandb knows; the last two are its older names of offline and online."""
MAX_BINS = 64
"""Most bins of a histogram."""


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """[monitor.wandb]: opens a record of the run at Weights & Biases.

    The key is wandb's own business: `wandb login`, or the environment variable WANDB_API_KEY.

    Raises:
        UsageError: wandb is not installed, or it takes no such project, tag or mode.
    """

    project: str
    """The project; created if it does not exist."""
    name: str | None = None
    """What the record is called; the run's name by default."""
    tags: tuple[str, ...] = ()
    """Labels to filter by."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """"offline" records into the run folder, for `wandb sync`; by default what WANDB_MODE says, else "online"."""

    def __post_init__(self) -> None:
        if not is_installed("wandb"):
            raise UsageError(INSTALL)
        if not self.project.strip() or len(self.project) > 128 or set(self.project) & set(_NOT_IN_PROJECTS):
            raise UsageError(
                f"[monitor.wandb] project = {self.project!r}; expected 1 to 128 characters without any of "
                f"{' '.join(_NOT_IN_PROJECTS)}. Whose project it is, the environment variable WANDB_ENTITY says"
            )
        wrong = next((tag for tag in self.tags if not 1 <= len(tag) <= 64), None)
        if wrong is not None:
            raise UsageError(f"[monitor.wandb] tags: found {wrong!r}; expected 1 to 64 characters")
        said = os.environ.get("WANDB_MODE")
        if self.mode is None and said and said not in _MODES:
            raise UsageError(
                f"WANDB_MODE is {said!r}; expected {', '.join(_MODES)}; unset it, or give [monitor.wandb] a mode"
            )

    def __call__(self, run: RunInfo) -> WandbMonitor:
        return WandbMonitor(self, run)


class WandbMonitor(Monitor):
    """One record. Its methods return at once, but for `close`, which waits for the upload until its deadline."""

    def __init__(self, settings: Wandb, run: RunInfo) -> None:
        self._settings = settings
        self._run = run
        self._records: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(MAX_RECORDS + 1)  # 1 for the end
        self._num_dropped = 0
        self._num_refused = 0
        self._is_lost = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="wandb")
        self._thread.start()

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """Every metric, and a histogram of each distribution."""
        self._put(step, {**metrics, **{name: _histogram(values) for name, values in distributions.items()}})

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """Every metric, under `eval/{env}/`."""
        self._put(step, {f"eval/{env}/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Wait for what is not uploaded yet, at most until the deadlines."""
        self._records.put_nowait(None)
        self._thread.join(INIT_SECONDS + FINISH_SECONDS)
        if self._thread.is_alive():
            _warn(f"did not finish within {INIT_SECONDS + FINISH_SECONDS:.0f} seconds; {self._how_to_upload()}")
        if self._num_dropped:
            _warn(f"{self._num_dropped} records were dropped: the service did not keep up")

    def _put(self, step: int, record: dict[str, Any]) -> None:
        if self._is_lost:
            return
        if self._records.qsize() >= MAX_RECORDS:
            self._num_dropped += 1
            if self._num_dropped == 1:
                _warn(f"{MAX_RECORDS} records wait for the service; further ones are dropped until it keeps up")
            return
        self._records.put_nowait((step, record))

    # ---- the thread

    def _work(self) -> None:
        try:
            run = self._open()
        except Exception as error:  # noqa: BLE001  the library and its service may raise anything
            self._is_lost = True
            _warn(f"the record could not be opened, and the run goes on without it: {_reason(error)}")
            return
        while (record := self._records.get()) is not None:
            self._log(run, *record)
        try:
            run.finish()
        except Exception as error:  # noqa: BLE001
            _warn(f"the record is not complete: {_reason(error)}; {self._how_to_upload()}")

    def _open(self) -> Any:
        began = time.monotonic()
        # Its reports of its own errors quote exceptions, and hold up the end of the process where the service hangs.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # here, on the thread: it takes seconds

        wandb.setup(wandb.Settings(silent=True))  # without it a missing key is asked for on the terminal
        mode = self._settings.mode or os.environ.get("WANDB_MODE") or "online"
        try:
            run = self._init(wandb, mode)
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown()  # its service still holds the id
            mode = "offline"
            run = self._init(wandb, mode)
            _warn(f"the service cannot be used ({_reason(error)}); {self._how_to_upload()}")
        # Asked for offline, the address is a warning of wandb's own.
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
                console="off",  # what is printed is the run's business, and may quote anything
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                disable_git=True,
                save_code=False,
                x_disable_meta=True,  # it holds the command line, where overrides may be keys
            ),
        )

    def _log(self, run: Any, step: int, record: dict[str, Any]) -> None:
        import wandb

        try:
            values = {
                name: wandb.Histogram(np_histogram=value) if isinstance(value, tuple) else value
                for name, value in record.items() if value is not None
            }  # fmt: skip
            run.log(values, step=step)
        except Exception as error:  # noqa: BLE001
            self._num_refused += 1
            if self._num_refused == 1:
                _warn(f"a record was refused, and so may be others: {_reason(error)}")

    def _how_to_upload(self) -> str:
        return f"type `wandb sync {self._run.folder}/wandb/*run-*` to upload what is recorded there"


def _histogram(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and edges; a bin for each whole number where all values are such. None of no values.

    >>> [array.tolist() for array in _histogram([0, 2, 2])]
    [[1, 0, 2], [-0.5, 0.5, 1.5, 2.5]]
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return None
    low, high = finite.min(), finite.max()
    if high - low < MAX_BINS and (finite == np.round(finite)).all():
        return np.histogram(finite, bins=np.arange(low - 0.5, high + 1))
    return np.histogram(finite, bins=MAX_BINS)


def _run_id(path: Path) -> str:
    """The id of the folder's run, made by its first process; anew where the file is damaged."""
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found):
        found = uuid.uuid4().hex[:12]
        write_file(path, found.encode())
    return found


def _warn(message: str) -> None:
    logger.warning("W&B: %s", message)


def _reason(error: Exception) -> str:
    text = without_secrets(str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
