"""Writes outcomes into the run folder, a file for each step, and brings them back to a checkpoint.

A thread of its own writes, so that neither the next step nor a checkpoint of another log waits for a large file.
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
"""Steps that may wait for the writer; their trajectories stay in memory. Then whoever brings another one waits."""


class OutcomeLog:
    """The outcome files of a run, and what its checkpoints say of them.

    `write` returns before the file is there; all else waits for it.

    Args:
        path: The folder of the files. By its name a checkpoint's manifest lists them.
        store: The run's checkpoints.
        first_step: Steps that earlier processes did; what they wrote beyond them is removed. What is missing or damaged
            is told, and the run goes on without it.
        retention: How much is kept; None: nothing is written.
        what: What is in the files, for people.
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
        """The file of this step. Where the system refuses, that is logged, and the run goes on."""
        if not self._writes:
            return
        self.wait(_MOST_WAITING)
        self._waiting.append(self._writer.submit(self._write, step, outcomes))

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many steps are not written yet. Several threads may wait at once; a bug in the writing
        of a step is raised to each that waits for it, and not again."""
        while len(self._waiting) > most:
            try:
                oldest = self._waiting[0]
            except IndexError:  # another one has waited for it
                return
            try:
                oldest.result()
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(oldest)

    def close(self) -> None:
        """Wait until everything is written, and end the writer, also where a bug in writing one step is raised."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def _write(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
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
        """What a checkpoint remembers of the files."""
        self.wait()
        return self._files.marks()

    @property
    def num_incomplete(self) -> int:
        """Trajectories that were written without their messages and info."""
        self.wait()
        return self._files.num_incomplete

    def _forget(self, step: int) -> None:
        """The checkpoints no longer list what is missing or damaged: it is told once."""
        there, name = self._files.marks(), self._files.path.name
        for number in (number for number in self._store.steps() if number <= step):
            with contextlib.suppress(CheckpointError):  # a damaged one further back, which is not gone on from
                logs = self._store.logs(number)
                listed = logs.get(name)
                if _are_marks(listed):
                    left = {step_of: mark for step_of, mark in listed.items() if step_of in there}
                    self._store.set_logs(number, {**logs, name: left})


def _are_marks(value: Any) -> TypeGuard[Mapping[str, Mapping[str, int]]]:
    """Whether a manifest says this of the files."""
    return isinstance(value, Mapping) and all(
        isinstance(mark, Mapping) and set(mark) == {"size", "crc32"} for mark in value.values()
    )
