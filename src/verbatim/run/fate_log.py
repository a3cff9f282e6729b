"""Writes the fates of each step into the run folder, and brings them back to a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from verbatim.checkpoints import CheckpointStore
from verbatim.disk import make_folder
from verbatim.errors import CheckpointError
from verbatim.fates.files import FateFolder
from verbatim.fates.retention import EVERYTHING, Retention
from verbatim.machine_faults import describe
from verbatim.monitors.trajectory_log import TRAJECTORIES
from verbatim.trajectories import Fate

logger = logging.getLogger(__name__)


class FateLog:
    """The fate files of a run, and what its checkpoints say of them.

    Args:
        path: The folder of the files.
        store: The run's checkpoints.
        first_step: Steps that earlier processes did; what they wrote beyond them is removed. What is missing or damaged
            is told, and the run goes on without it.
        retention: How much is kept; None = nothing is written.
    """

    def __init__(self, path: Path, *, store: CheckpointStore, first_step: int, retention: Retention | None) -> None:
        self._store, self._writes, self._is_failing = store, retention is not None, False
        self._files = FateFolder(path, retention or EVERYTHING)
        if self._writes:
            make_folder(path)
        logs = store.logs(first_step) if first_step else {}
        marks = logs.get(TRAJECTORIES, {} if first_step == 0 else None)
        faults = self._files.restore(first_step, marks if _are_marks(marks) else None)
        for fault in faults:
            logger.warning("%s", fault)
        if faults:
            self._forget(first_step)

    def write(self, step: int, fates: Sequence[Fate]) -> None:
        """The file of this step. Where the system refuses, that is logged, and the run goes on."""
        if not self._writes:
            return
        incomplete = self._files.num_incomplete
        try:
            self._files.write(step, fates)
        except OSError as error:
            if not self._is_failing:
                logger.error("the trajectories of step %d could not be written: %s; the run goes on without them",
                             step, describe(error, self._files.path))  # fmt: skip
            self._is_failing = True
            return
        if self._is_failing:
            logger.warning("trajectories are written again, from step %d on", step)
        self._is_failing = False
        if self._files.num_incomplete and not incomplete:
            logger.error("trajectories of step %d are in %s without their messages and info, which are not JSON", step,
                         self._files.path)  # fmt: skip

    def marks(self) -> dict[str, Any]:
        """What a checkpoint remembers of the files."""
        return self._files.marks()

    @property
    def num_incomplete(self) -> int:
        """Trajectories that were written without their messages and info."""
        return self._files.num_incomplete

    def _forget(self, step: int) -> None:
        """The checkpoints no longer list what is missing or damaged: it is told once."""
        there = self._files.marks()
        for number in (number for number in self._store.steps() if number <= step):
            with contextlib.suppress(CheckpointError):  # a damaged one further back, which is not gone on from
                logs = self._store.logs(number)
                listed = logs.get(TRAJECTORIES)
                if _are_marks(listed):
                    left = {name: mark for name, mark in listed.items() if name in there}
                    self._store.set_logs(number, {**logs, TRAJECTORIES: left})


def _are_marks(value: Any) -> TypeGuard[Mapping[str, Mapping[str, int]]]:
    """Whether a manifest says this of the files."""
    return isinstance(value, Mapping) and all(
        isinstance(mark, Mapping) and set(mark) == {"size", "crc32"} for mark in value.values()
    )
