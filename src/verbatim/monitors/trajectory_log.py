"""Writes and reads trajectories as JSON lines: `{"step": 7, "trajectory": {...}}`, as `trajectory_json` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verbatim.errors import UsageError
from verbatim.monitors.jsonl import JsonlWriter, LogMark, read_jsonl
from verbatim.trajectories.record import TrajectoryRecord
from verbatim.trajectory_json import trajectory_from_json, trajectory_to_json
from verbatim.types import Trajectory

NOT_WRITTEN = "not_written"
"""The key of a logged trajectory's `info` that says what is missing in its record."""


class TrajectoryLog:
    """Appends trajectories with the step that they were trained in. `mark` is as for `JsonlWriter`."""

    def __init__(self, path: Path, mark: LogMark | None = None) -> None:
        self.writer = JsonlWriter(path, mark)

    def write(self, step: int, trajectory: TrajectoryRecord) -> None:
        self.writer.write({"step": step, "trajectory": trajectory_to_json(trajectory)})

    def close(self) -> None:
        self.writer.close()


def read_trajectories(path: Path) -> Iterator[tuple[int, Trajectory]]:
    """Step and trajectory of each line.

    Raises:
        UsageError: no such file, or a line that `TrajectoryLog` did not write.
    """
    for number, record in enumerate(read_jsonl(path), start=1):
        try:
            yield record["step"], trajectory_from_json(record["trajectory"])
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise UsageError(f"{path}:{number}: no trajectory of ours ({type(error).__name__}: {error})") from error


def is_trajectory(record: Any) -> bool:
    """Whether a value is a line that `TrajectoryLog` writes."""
    try:
        trajectory_from_json(record["trajectory"])
        return type(record["step"]) is int
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, OverflowError):
        return False
