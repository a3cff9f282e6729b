"""Writes and reads trajectories as JSON lines: `{"format": 1, "step": 7, "trajectory": {...}}`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verbatim.core.disk import refuse_link
from verbatim.core.errors import UsageError
from verbatim.core.formats import LINES, stamped
from verbatim.core.imports import refuse_without
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.trajectory_json import trajectory_from_json, trajectory_to_json
from verbatim.core.types import Trajectory
from verbatim.logs.monitors.jsonl import JsonlLog, read_log

TRAJECTORIES = "trajectories"
"""Name of the folder with a run's outcome files."""
EVALUATIONS = "evaluations"
"""Name of the folder with the outcome files of evaluation episodes."""


class TrajectoryLog(JsonlLog):
    """Appends trajectories, each with the step in which it was trained."""

    def write(self, step: int, trajectory: TrajectoryRecord) -> None:
        self.writer.write(trajectory_line(step, trajectory))


def trajectory_line(step: int, trajectory: TrajectoryRecord) -> dict[str, Any]:
    """The record of a trajectory. Arrays stay arrays, because `plain` converts them to lists when the record is
    written."""
    return stamped(LINES, {"step": step, "trajectory": trajectory_to_json(trajectory)})


def read_trajectories(path: Path) -> Iterator[tuple[int, Trajectory]]:
    """Read the trajectories, each with its step, from a run folder, its `trajectories` folder, a Parquet file or a
    JSONL file.

    Raises:
        FormatError: a file has a different format number, or no format number.
        UsageError: there are no trajectories, a file is a link or damaged, or pyarrow is needed but not installed.
    """
    if path.is_dir() or path.suffix == ".parquet":
        files = path / TRAJECTORIES
        refuse_link(files)
        refuse_without("pyarrow", extra="train", what=f"reading {path}")
        from verbatim.logs.outcomes.files import read_outcomes

        for step, outcome in read_outcomes(files if files.is_dir() else path):
            assert isinstance(outcome.trajectory, Trajectory)
            yield step, outcome.trajectory
        return
    for number, record in enumerate(read_log(path, LINES), start=1):
        try:
            yield record["step"], trajectory_from_json(record["trajectory"])
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise UsageError(f"{path}:{number}: not a Verbatim trajectory ({type(error).__name__}: {error})") from error


def read_evaluated(run: Path) -> Iterator[tuple[int, Trajectory]]:
    """Read the trajectories of the evaluation episodes in a run folder, each with its step. There may be none.

    Raises:
        UsageError: as for `read_trajectories`.
    """
    folder = run / EVALUATIONS
    refuse_link(folder)
    if folder.is_dir() and any(folder.iterdir()):
        yield from read_trajectories(folder)
