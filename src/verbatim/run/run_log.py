"""Writes everything a run logs: metrics, trajectories, alarms, the console, checkpoints, the summary."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import rich.console

from verbatim.core.disk import write_private
from verbatim.core.errors import CheckpointError, RunStopped
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.records.failed import MAX_FAILED
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.environments.environment import Environment
from verbatim.logs.checkpoints import CONFIG, CheckpointStore, RunFolder, read_origin, write_loop_state, write_record
from verbatim.logs.monitors.alarm import Alarm, Detector
from verbatim.logs.monitors.alarm_log import AlarmLog, is_alarm, read_alarms, standing_alarms
from verbatim.logs.monitors.console import Console
from verbatim.logs.monitors.jsonl import JsonlWriter, LogMark, refuse_other_log
from verbatim.logs.monitors.learning_curve import LearningCurve
from verbatim.logs.monitors.metrics_log import MetricsLog, is_metrics
from verbatim.logs.monitors.monitor import Monitor, Monitors
from verbatim.logs.monitors.restore import restore
from verbatim.logs.outcomes.retention import EVERYTHING, Retention
from verbatim.run.ending import RunState, ending
from verbatim.run.evaluation_log import EvaluationLog
from verbatim.run.orchestrator.assemble import rollout_distributions
from verbatim.run.orchestrator.evaluate import Evaluation
from verbatim.run.outcome_log import OutcomeLog
from verbatim.run.summary import best_constants, summary_of
from verbatim.trainer.transport import TrainerLink

logger = logging.getLogger(__name__)

ALARMS = "alarms"
"""The key under which a checkpoint's state holds the alarm detector's state."""


class RunLog:
    """The `Observer` and `Checkpointer` of the training loop: passes events on to files, console and monitors.

    Args:
        folder: The run folder.
        title: The learning curve's title.
        max_steps: Total number of steps.
        first_step: Number of steps done by earlier processes. Anything logged for later steps is dropped. Missing or
            damaged parts of the logs are reported, and the run continues without them.
        trajectories: How many trajectories to keep; None to store no trajectories. Evaluated episodes are all stored,
            unless this is None.
        console: Where progress is printed.
        monitors: Monitors in addition to console, logs and learning curve.
        detector: Raises alarms; its state has been loaded from the checkpoint already.
        store: The run's checkpoints.
        environments: The evaluated environments by label. If empty, no evaluated episodes are stored.
        earlier_seconds: Wall-clock time of the run's earlier processes.
        started: `time.monotonic()` when this process began.
        max_failed: The largest share of failed episodes that an evaluation may have and still be used in comparisons.
        on_checkpoint: Called after each checkpoint.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        title: str,
        max_steps: int,
        first_step: int,
        trajectories: Retention | None,
        console: rich.console.Console | None = None,
        monitors: Sequence[Monitor] = (),
        detector: Detector | None = None,
        store: CheckpointStore,
        environments: Mapping[str, Environment],
        earlier_seconds: float,
        started: float,
        max_failed: float = MAX_FAILED,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_checkpoint = on_checkpoint
        self._max_failed = max_failed
        origin = read_origin(folder.path)
        self._forked_at = -1 if origin is None else origin.step
        self._folder = folder
        self._store = store
        self._earlier_seconds = earlier_seconds
        self._started = started
        self._best_constant = best_constants(environments)
        self._detector = detector
        metrics = MetricsLog(folder.metrics, mark=self._go_back(folder.metrics, first_step, is_metrics))
        alarms = AlarmLog(folder.alarms, self._go_back(folder.alarms, first_step, is_alarm))
        self._writers: dict[str, JsonlWriter] = {log.writer.path.name: log.writer for log in (metrics, alarms)}
        self._outcomes = OutcomeLog(folder.trajectories, store=store, first_step=first_step, retention=trajectories)
        self._evaluated = OutcomeLog(
            folder.evaluations,
            store=store,
            first_step=first_step,
            what="evaluated episodes",
            retention=EVERYTHING if trajectories is not None and environments else None,
        )
        self._evaluations = EvaluationLog(self._evaluated, environments)
        curve = LearningCurve(folder.metrics, folder.learning_curve, title=title, best_constant=self._best_constant)
        self.results: dict[str, Any] = {}
        """Final results of the loop, in addition to the results computed from the metrics."""
        standing = standing_alarms(read_alarms(folder.alarms)) if detector is not None else ()
        self._console = Console(max_steps, console=console, first_step=first_step, alarms=standing)
        self._monitors = Monitors([metrics, alarms, self._console, curve, *monitors])

    def _go_back(self, path: Path, step: int, is_record: Callable[[Any], bool]) -> LogMark:
        """Truncate a log to the checkpoint of this step. Damage is reported only once, because the marks are
        updated."""
        logs = self._store.logs(step) if step else {}
        checkpoints = [number for number in self._store.steps() if number <= step]
        found = restore(
            path,
            step=step,
            mark=_mark(logs.get(path.name)),
            is_record=is_record,
            checkpoints=checkpoints,
            every_step=path == self._folder.metrics,
        )
        refuse_other_log(path)
        if found.fault is not None:
            logger.warning("%s", found.fault)
            for number, mark in found.earlier.items():
                with contextlib.suppress(CheckpointError):  # an older, damaged checkpoint, which is not resumed from
                    self._store.set_logs(number, {**self._store.logs(number), path.name: dataclasses.asdict(mark)})
        return found.mark

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run so far, over all its processes."""
        return self._earlier_seconds + time.monotonic() - self._started

    def stage(
        self, what: str, total: int | None = None, *, count: Callable[[], int] | None = None
    ) -> AbstractContextManager[object]:
        """While the block runs, show a progress bar at the bottom of the terminal."""
        return self._console.view.stage(what, total, count=count)

    def start(self, config: Mapping[str, Any]) -> None:
        """Tell the monitors that the run begins. `config` must not contain secrets."""
        self._monitors.on_start(config)

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Log a trained batch."""
        trajectories = [outcome.trajectory for outcome in outcomes]
        self._monitors.on_step(step, metrics, rollout_distributions(trajectories, step - 1))
        self._monitors.on_trajectories(step, outcomes)
        self._detect(lambda detector: detector.on_step(step, metrics, outcomes))
        self._outcomes.write(step, outcomes)

    def _detect(self, look: Callable[[Detector], Iterable[Alarm]]) -> None:
        """Pass the alarms that the detector raises now to the monitors."""
        if self._detector is None:
            return
        try:
            alarms = list(look(self._detector))
        except Exception as error:  # as with monitors, a bug here must not cost hours of training
            if is_out_of_memory(error):
                raise  # this is not the detector's fault, and the process cannot be trusted any more
            logger.exception("alarms: %s failed; the run goes on without alarms", type(self._detector).__name__)
            self._detector = None
            return
        for alarm in alarms:
            self._monitors.on_alarm(alarm)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation of the policy after this step; step 0 is before training."""
        self._monitors.on_eval(step, evaluation.env, evaluation.metrics)
        self._detect(lambda detector: detector.on_eval(step, evaluation.env, evaluation.metrics))
        self._evaluations.add(step, evaluation.env, evaluation.trajectories)

    async def save(
        self, step: int, trainer: TrainerLink, state: Mapping[str, Any], trainer_state: Path | None = None
    ) -> None:
        """Write a checkpoint: weights and optimizer from the trainer, everything else as JSON.

        Args:
            step: The number of steps done.
            trainer: The trainer, which saves its part.
            state: The loop's state.
            trainer_state: A folder with the trainer's part, if this part is saved already.

        Raises:
            CheckpointNotWritten: the trainer could not save its part, or a file could not be written.
        """
        with self.stage("checkpoint"):
            if trainer_state is None:
                # The folder is inside the run folder, so that its parts can be renamed into the checkpoint, within one
                # file system.
                trainer_state = self._folder.path / ".trainer_state"
                shutil.rmtree(trainer_state, ignore_errors=True)
                try:
                    trainer_state.mkdir()
                    await trainer.save(trainer_state, step)
                except (RunStopped, OSError) as error:
                    shutil.rmtree(trainer_state, ignore_errors=True)
                    raise self._store.refused(step, error) from error
            alarms = {} if self._detector is None else {ALARMS: self._detector.state_dict()}
            await asyncio.to_thread(
                self._write_checkpoint, step, {**state, "seconds": self.seconds, **alarms}, trainer_state
            )

    def _write_checkpoint(self, step: int, state: Mapping[str, Any], trainer_state: Path) -> None:
        """Write the checkpoint's folder, and update the links to the latest and the best checkpoint."""
        # The logs are synced first, so that they are never shorter than the checkpoint says.
        try:
            best = state["evaluations"]["best"]
            with self._store.writing(step, self._sync_logs(), best) as temporary:
                for part in trainer_state.iterdir():
                    os.rename(part, temporary / part.name)
                write_loop_state(temporary, state)
                write_private(temporary / CONFIG, self._folder.toml.encode())
        finally:
            shutil.rmtree(trainer_state, ignore_errors=True)
        self._folder.link_latest()
        self.link_best(best)
        self._on_checkpoint()

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """Record that the evaluation after this step, which has a checkpoint, is the best so far."""
        self._store.mark_best(step, best)
        self.link_best(best)

    def link_best(self, best: Mapping[str, Any] | None) -> None:
        """Point the run folder's link at the best checkpoint; None removes it."""
        self._folder.link_best(best["step"] if best is not None else None)

    def without_missing_best(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The loop's state from a checkpoint, without the best evaluation if its checkpoint no longer exists."""
        evaluations = state["evaluations"]
        best = evaluations["best"]
        if best is None or best["step"] in self._store.steps():
            return state
        logger.warning(
            "the best checkpoint, that of step %d, is gone; the next evaluation becomes the best so far", best["step"]
        )
        return {**state, "evaluations": {**evaluations, "best": None}}

    def _sync_logs(self) -> dict[str, Any]:
        """Sync the logs to disk and return their lengths. A log that cannot be synced does not prevent a checkpoint."""
        outcomes = {self._folder.trajectories: self._outcomes, self._folder.evaluations: self._evaluated}
        marks: dict[str, Any] = {folder.name: log.marks() for folder, log in outcomes.items()}
        for name, writer in self._writers.items():
            try:
                marks[name] = dataclasses.asdict(writer.sync())
            except OSError as error:
                logger.error("%s could not be written to the disk: %s", writer.path, error.strerror or error)
        return marks

    def close(self, state: RunState = "stopped") -> None:
        """Tell the monitors how this process ended, close the files, and draw the learning curve."""
        outcome = ending(
            self._folder,
            self._best_constant,
            state=state,
            seconds=self.seconds,
            max_failed=self._max_failed,
            forked_at=self._forked_at,
        )
        self._monitors.on_end({**outcome, "results": {**outcome["results"], **self.results}})
        self._monitors.close()
        with contextlib.ExitStack() as stack:  # if closing one of them raises, the other is still closed
            for log in (self._outcomes, self._evaluated):
                stack.callback(log.close)
            self._evaluations.flush()
        if incomplete := self._evaluated.num_incomplete + self._outcomes.num_incomplete:
            logger.error("%d trajectories were logged without their messages and info, which are not JSON", incomplete)

    def summarize(self) -> dict[str, Any]:
        """The final results, which are also written to `summary.json`."""
        figures = summary_of(
            self._folder.metrics, self._best_constant, self._folder.path, self._max_failed, self._forked_at
        )
        summary: dict[str, Any] = {**figures, **self.results}
        summary["seconds"] = round(self.seconds, 1)
        write_record(self._folder.summary, summary)
        return summary


def _mark(value: Any) -> LogMark | None:
    """The mark stored in a manifest; None if it is missing or malformed."""
    names = [field.name for field in dataclasses.fields(LogMark)]
    if not isinstance(value, dict) or not all(type(value.get(name)) is int for name in names):
        return None
    return LogMark(**{name: value[name] for name in names})
