"""Reads the Parquet files in which a run keeps its trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.inspection.doctor.logs.log_file import LogFile, LoggedTrajectory
from verbatim.logs.monitors.trajectory_log import TRAJECTORIES, read_trajectories


class OutcomeFormat:
    """A run's folder, its folder `trajectories`, or one file of that."""

    name = "verbatim"
    expected = "runs/NAME/latest, the folder of a run"
    about = "trajectories of a run of Verbatim"

    def matches(self, record: Mapping[str, Any], /) -> bool:
        """No line is of this format."""
        return False

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        """The trajectories; each one's `line` is its place among them, from 1."""
        for number, (_, trajectory) in enumerate(read_trajectories(file.path), start=1):
            yield LoggedTrajectory(trajectory=trajectory, line=number)


def is_outcome_path(path: Path) -> bool:
    """Whether trajectories are kept there as Parquet files."""
    if path.is_dir():
        return (path / TRAJECTORIES).is_dir() or any(path.glob("step-*.parquet"))
    return path.suffix == ".parquet" and path.is_file()
