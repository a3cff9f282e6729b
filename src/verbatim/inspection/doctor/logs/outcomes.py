"""Reads the Parquet files in which a run keeps its trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.inspection.doctor.logs.log_file import LogFile, LoggedTrajectory
from verbatim.logs.monitors.trajectory_log import TRAJECTORIES, read_trajectories


class OutcomeFormat:
    """Reads the trajectories of a run folder, of its `trajectories` folder, or of one file in that folder."""

    name = "verbatim"
    expected = "runs/NAME/latest, a run folder"
    about = "trajectories of a run of Verbatim"

    def matches(self, record: Mapping[str, Any], /) -> bool:
        """Return False, because this format has no lines."""
        return False

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        """Yield the trajectories. The `line` of a trajectory is its position among all yielded trajectories, counted
        from 1."""
        for number, (_, trajectory) in enumerate(read_trajectories(file.path), start=1):
            yield LoggedTrajectory(trajectory=trajectory, line=number)


def is_outcome_path(path: Path) -> bool:
    """True if the path contains, or is, Parquet files with trajectories."""
    if path.is_dir():
        return (path / TRAJECTORIES).is_dir() or any(path.glob("step-*.parquet"))
    return path.suffix == ".parquet" and path.is_file()
