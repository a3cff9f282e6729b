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
"""The key of a checkpoint's state that holds what the detector remembers."""


class RunLog:
    """An `Observer` and a `Checkpointer`: the loop tells it what happens, it tells files and people.

    Args:
        title: The learning curve's title.
        max_steps: Steps in all.
        first_step: Steps that an earlier process did; what that process logged beyond them is dropped. What is
            missing or damaged in its logs is told, and the run goes on without it.
        trajectories: How many trajectories are kept; None: none. Of evaluations all are kept, unless none are.
        monitors: Those that listen beside the console, the logs and the learning curve.
        detector: What raises alarms; what a checkpoint holds of it is loaded already.
        environments: Those that are evaluated, by label; with none no evaluated episodes are kept.
        earlier_seconds: What earlier processes of this run took.
        started: `time.monotonic()` when this process began.
        max_failed: Largest share of failed episodes with which evaluations are compared.
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
    ) -> None:
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
        """What the loop says of its end, beside the figures of the metrics."""
        standing = standing_alarms(read_alarms(folder.alarms)) if detector is not None else ()
        self._console = Console(max_steps, console=console, first_step=first_step, alarms=standing)
        self._monitors = Monitors([metrics, alarms, self._console, curve, *monitors])

    def _go_back(self, path: Path, step: int, is_record: Callable[[Any], bool]) -> LogMark:
        """Bring a log back to the checkpoint of this step; where it is damaged, say so, and not again next time."""
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
                with contextlib.suppress(CheckpointError):  # a damaged one further back, which is not gone on from
                    self._store.set_logs(number, {**self._store.logs(number), path.name: dataclasses.asdict(mark)})
        return found.mark

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run so far, over all its processes."""
        return self._earlier_seconds + time.monotonic() - self._started

    def stage(
        self, what: str, total: int | None = None, *, count: Callable[[], int] | None = None
    ) -> AbstractContextManager[object]:
        """A bar below the lines of a terminal, as long as the block runs."""
        return self._console.view.stage(what, total, count=count)

    def start(self, config: Mapping[str, Any]) -> None:
        """Tell the monitors that the run begins; `config` has no secrets."""
        self._monitors.on_start(config)

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]) -> None:
        """The batch of this step was trained."""
        trajectories = [outcome.trajectory for outcome in outcomes]
        self._monitors.on_step(step, metrics, rollout_distributions(trajectories, step - 1))
        self._monitors.on_trajectories(step, outcomes)
        self._detect(lambda detector: detector.on_step(step, metrics, outcomes))
        self._outcomes.write(step, outcomes)

    def _detect(self, look: Callable[[Detector], Iterable[Alarm]]) -> None:
        """Tell the monitors of the alarms that the detector raises now."""
        if self._detector is None:
            return
        try:
            alarms = list(look(self._detector))
        except Exception as error:  # as with monitors: it must not cost hours of training
            if is_out_of_memory(error):
                raise  # nothing of the rules' own
            logger.exception("alarms: %s failed; the run goes on without alarms", type(self._detector).__name__)
            self._detector = None
            return
        for alarm in alarms:
            self._monitors.on_alarm(alarm)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """The policy after this step was evaluated; 0 is before the first."""
        self._monitors.on_eval(step, evaluation.env, evaluation.metrics)
        self._detect(lambda detector: detector.on_eval(step, evaluation.env, evaluation.metrics))
        self._evaluations.add(step, evaluation.env, evaluation.trajectories)

    async def save(
        self, step: int, trainer: TrainerLink, state: Mapping[str, Any], trainer_state: Path | None = None
    ) -> None:
        """A checkpoint of what continues: weights and optimizer from the trainer, everything else as JSON.

        Raises:
            CheckpointNotWritten: the disk or the trainer refused.
        """
        with self.stage("checkpoint"):
            if trainer_state is None:
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

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """The evaluation after this step, whose checkpoint is there, is the best so far."""
        self._store.mark_best(step, best)
        self.link_best(best)

    def link_best(self, best: Mapping[str, Any] | None) -> None:
        """Have the run's folder point to the best checkpoint; None: there is none."""
        self._folder.link_best(best["step"] if best is not None else None)

    def without_missing_best(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The loop's state in a checkpoint, without a best evaluation whose checkpoint is gone."""
        evaluations = state["evaluations"]
        best = evaluations["best"]
        if best is None or best["step"] in self._store.steps():
            return state
        logger.warning(
            "the best checkpoint, that of step %d, is gone; the next evaluation is the best so far", best["step"]
        )
        return {**state, "evaluations": {**evaluations, "best": None}}

    def _sync_logs(self) -> dict[str, Any]:
        """Wait until the logs are on disk; how long each is. One that cannot be synced costs no checkpoint."""
        outcomes = {self._folder.trajectories: self._outcomes, self._folder.evaluations: self._evaluated}
        marks: dict[str, Any] = {folder.name: log.marks() for folder, log in outcomes.items()}
        for name, writer in self._writers.items():
            try:
                marks[name] = dataclasses.asdict(writer.sync())
            except OSError as error:
                logger.error("%s could not be written to the disk: %s", writer.path, error.strerror or error)
        return marks

    def close(self, state: RunState = "stopped") -> None:
        """Tell the monitors how this process of the run ended, close files, draw the curve."""
        said = ending(
            self._folder,
            self._best_constant,
            state=state,
            seconds=self.seconds,
            max_failed=self._max_failed,
            forked_at=self._forked_at,
        )
        self._monitors.on_end({**said, "results": {**said["results"], **self.results}})
        self._monitors.close()
        with contextlib.ExitStack() as stack:  # a bug in the writing of one leaves the other one whole
            for log in (self._outcomes, self._evaluated):
                stack.callback(log.close)
            self._evaluations.flush()
        if incomplete := self._evaluated.num_incomplete + self._outcomes.num_incomplete:
            logger.error("%d trajectories were logged without their messages and info, which are not JSON", incomplete)

    def summarize(self) -> dict[str, Any]:
        """The run's figures, also written to `summary.json`."""
        figures = summary_of(
            self._folder.metrics, self._best_constant, self._folder.path, self._max_failed, self._forked_at
        )
        summary: dict[str, Any] = {**figures, **self.results}
        summary["seconds"] = round(self.seconds, 1)
        write_record(self._folder.summary, summary)
        return summary


def _mark(value: Any) -> LogMark | None:
    """The mark in a manifest, or None."""
    names = [field.name for field in dataclasses.fields(LogMark)]
    if not isinstance(value, dict) or not all(type(value.get(name)) is int for name in names):
        return None
    return LogMark(**{name: value[name] for name in names})
