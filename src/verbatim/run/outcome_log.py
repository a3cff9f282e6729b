"""Writes outcomes into the run folder, one file per step, and restores the files to a checkpoint.

A separate thread writes, so that neither the next step nor a different log's part of a checkpoint waits for a large
file.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

from verbatim.core.disk import make_folder
from verbatim.core.errors import CheckpointError
from verbatim.core.machine_faults import describe
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.checkpoints import CheckpointStore
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.logs.outcomes.retention import EVERYTHING, Retention

logger = logging.getLogger(__name__)


_MOST_WAITING = 2
"""Number of steps that may be queued in memory for writing; beyond that, `write` blocks."""


class OutcomeLog:
    """The outcome files of a run, and their entries in its checkpoints.

    `write` returns before the file is complete; all other methods wait for it.

    Args:
        path: The folder of the files. Its name is the key under which a checkpoint lists them.
        store: The run's checkpoints.
        first_step: Number of steps done by earlier processes; files of later steps are removed. Missing or damaged
            files are reported, and the run continues without them.
        retention: How much to keep; None to write nothing.
        what: What the files contain, for messages.
    """

    def __init__(
        self,
        path: Path,
        *,
        store: CheckpointStore,
        first_step: int,
        retention: Retention | None,
        what: str = "trajectories",
    ) -> None:
        self._store, self._writes, self._is_failing, self._what = store, retention is not None, False, what
        self._files = OutcomeFolder(path, retention or EVERYTHING)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{path.name}-writer")
        self._waiting: deque[Future[None]] = deque()
        if self._writes:
            make_folder(path)
        logs = store.logs(first_step) if first_step else {}
        marks = logs.get(path.name)
        faults = self._files.restore(first_step, marks if _are_marks(marks) else {})
        for fault in faults:
            logger.warning("%s", fault)
        if faults:
            self._forget(first_step)

    def write(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Queue the file of this step. If the file system refuses to write it, this is logged, and the run
        continues."""
        if not self._writes:
            return
        self.wait(_MOST_WAITING)
        self._waiting.append(self._writer.submit(self._write, step, outcomes))

    def wait(self, most: int = 0) -> None:
        """Wait until at most `most` steps are still queued. Several threads may wait at the same time. An exception in
        writing a step is raised in every thread that waits for that step, then discarded."""
        while len(self._waiting) > most:
            try:
                oldest = self._waiting[0]
            except IndexError:  # another thread has already waited for it
                return
            try:
                oldest.result()
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(oldest)

    def close(self) -> None:
        """Wait until everything is written, then end the writer thread, even if writing raised an exception."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Write one step's file, on the writer thread. Consecutive failures are logged once."""
        incomplete = self._files.num_incomplete
        try:
            self._files.write(step, outcomes)
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    "the %s of step %d could not be written: %s; the run goes on without them",
                    self._what,
                    step,
                    describe(error, self._files.path),
                )
            self._is_failing = True
            return
        if self._is_failing:
            logger.warning("%s are written again, from step %d on", self._what, step)
        self._is_failing = False
        if self._files.num_incomplete and not incomplete:
            logger.error(
                "%s of step %d are in %s without their messages and info, which are not JSON",
                self._what,
                step,
                self._files.path,
            )

    def marks(self) -> dict[str, Any]:
        """The marks of the outcome files, to be stored in a checkpoint's manifest."""
        self.wait()
        return self._files.marks()

    @property
    def num_incomplete(self) -> int:
        """Number of trajectories written without their messages and info, because these are not JSON."""
        self.wait()
        return self._files.num_incomplete

    def _forget(self, step: int) -> None:
        """Remove missing and damaged files from the checkpoints' lists, so that they are reported only once."""
        there, name = self._files.marks(), self._files.path.name
        for number in (number for number in self._store.steps() if number <= step):
            with contextlib.suppress(CheckpointError):  # an older, damaged checkpoint, which is not resumed from
                logs = self._store.logs(number)
                listed = logs.get(name)
                if _are_marks(listed):
                    left = {step_of: mark for step_of, mark in listed.items() if step_of in there}
                    self._store.set_logs(number, {**logs, name: left})


def _are_marks(value: Any) -> TypeGuard[Mapping[str, Mapping[str, int]]]:
    """True if this is a manifest's list of outcome files."""
    return isinstance(value, Mapping) and all(
        isinstance(mark, Mapping) and set(mark) == {"size", "crc32"} for mark in value.values()
    )
