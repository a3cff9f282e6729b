"""Keeps the episodes of evaluations: one file for each evaluation, whatever the number of its environments."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.run.outcome_log import OutcomeLog


class EvaluationLog:
    """Gathers the episodes that were played after a step, and writes them when every environment has given its own.

    Args:
        files: Where they are written.
        environments: The labels of those that are evaluated.
    """

    def __init__(self, files: OutcomeLog, environments: Collection[str]) -> None:
        self._files, self._environments = files, frozenset(environments)
        self._step = -1
        self._played: dict[str, Sequence[TrajectoryRecord]] = {}

    def add(self, step: int, env: str, trajectories: Sequence[TrajectoryRecord]) -> None:
        """The episodes of one environment after this step."""
        if step != self._step:
            self.flush()
        self._step = step
        self._played[env] = trajectories
        if self._environments <= self._played.keys():
            self.flush()

    def flush(self) -> None:
        """Write what was gathered: all of an evaluation, or of one that did not come to its end what there is."""
        if any(self._played.values()):
            self._files.write(
                self._step, [TrajectoryOutcome.of_evaluated(t) for played in self._played.values() for t in played]
            )
            self._files.wait()
        self._played = {}
