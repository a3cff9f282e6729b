"""Reads trajectories in the log format of Verbatim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.doctor.logs.base import DAMAGED, LogFile, LoggedTrajectory, other_format
from verbatim.trajectory_json import trajectory_from_json


class VerbatimFormat:
    """`trajectories.jsonl` of a run, or what `verbatim eval --out` wrote."""

    name = "verbatim"
    expected = '{"step": 7, "trajectory": {"turns": [{"prompt": ..., "completion_ids": [...]}, ...], ...}}'

    def recognises(self, record: Mapping[str, Any]) -> bool:
        trajectory = record.get("trajectory")
        return isinstance(trajectory, dict) and "turns" in trajectory

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        for line, _ in file.lines():
            if not self.recognises(line.record):
                file.problems.add(line.number, other_format(line.record))
                continue
            try:
                trajectory = trajectory_from_json(line.record["trajectory"])
            except DAMAGED as error:
                file.damaged(line.number, error)
                continue
            yield LoggedTrajectory(trajectory=trajectory, line=line.number)

    def note(self) -> str:
        return "trajectories of a run of Verbatim"
