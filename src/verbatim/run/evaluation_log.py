"""Writes the episodes of evaluations: one file per evaluation, which covers all its environments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.run.outcome_log import OutcomeLog


class EvaluationLog:
    """Collects the episodes played after a step, and writes them once all environments have been evaluated.

    Args:
        files: Writes the files.
        environments: The labels of the evaluated environments.
    """

    def __init__(self, files: OutcomeLog, environments: Collection[str]) -> None:
        self._files, self._environments = files, frozenset(environments)
        self._step = -1
        self._played: dict[str, Sequence[TrajectoryRecord]] = {}

    def add(self, step: int, env: str, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Add one environment's episodes of the evaluation after this step."""
        if step != self._step:
            self.flush()
        self._step = step
        self._played[env] = trajectories
        if self._environments <= self._played.keys():
            self.flush()

    def flush(self) -> None:
        """Write the collected episodes, including the episodes of an evaluation that was interrupted."""
        if any(self._played.values()):
            self._files.write(
                self._step, [TrajectoryOutcome.of_evaluated(t) for played in self._played.values() for t in played]
            )
            self._files.wait()
        self._played = {}
