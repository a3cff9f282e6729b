"""Reads logs with one trajectory per line: Verbatim's own logs, and rollouts of verifiers 0.1.8 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.core.formats import LINES, content_of
from verbatim.core.trajectory_json import trajectory_from_json
from verbatim.core.types import StopReason, Trajectory, Turn
from verbatim.inspection.doctor.logs.log_file import DAMAGED, LogFile, LoggedTrajectory


@dataclass(kw_only=True)
class LineFormat:
    """A format in which each line is a complete trajectory."""

    name: str
    expected: str
    about: str
    matches: Callable[[Mapping[str, Any]], bool]
    trajectory: Callable[[Mapping[str, Any], int], Trajectory]
    """Called with the record of a line and the line number; returns the trajectory."""
    kind: str | None = None
    """The key in `FORMATS` under which the format number of the lines is listed; None if the lines have no format
    number."""

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        for line in file.lines_of(self):
            if self.kind is not None:
                # This check is outside of the `try`, which would catch FormatError too: a file of another version is
                # refused as a whole.
                content_of(self.kind, line.record, f"{file.path}:{line.number}")
            try:
                yield LoggedTrajectory(trajectory=self.trajectory(line.record, line.number), line=line.number)
            except DAMAGED as error:
                file.damaged(line.number, error)


def _is_ours(record: Mapping[str, Any]) -> bool:
    trajectory = record.get("trajectory")
    return isinstance(trajectory, dict) and "turns" in trajectory


VERBATIM = LineFormat(
    name="verbatim",
    expected='{"format": 1, "step": 7, "trajectory": {"turns": [{"prompt": ..., "completion_ids": [...]}, ...], ...}}',
    about="trajectories of a run of Verbatim",
    matches=_is_ours,
    trajectory=lambda record, line: trajectory_from_json(record["trajectory"]),
    kind=LINES,
)
"""The output of `verbatim export`, `verbatim eval --out` and `verbatim rollout --out`, and traces."""


def _is_verifiers(record: Mapping[str, Any]) -> bool:
    steps = record.get("trajectory")
    return isinstance(steps, list) and all(isinstance(step, dict) and "tokens" in step for step in steps)


def _rollout(record: Mapping[str, Any], line: int) -> Trajectory:
    """Convert a rollout of verifiers to a trajectory. Its `trajectory` is a list of steps, each with the ids of one
    request."""
    steps = record["trajectory"]
    with_ids = [step for step in steps if step["tokens"] is not None]
    if steps and not with_ids:
        raise ValueError("no step has tokens: the engine was not asked for ids, or the ids were not kept")
    # The trajectory's id may be only in its steps. The steps of sub-agents have other ids.
    own = record.get("trajectory_id") or next((s.get("trajectory_id") for s in with_ids if not _is_sub(s)), None)
    turns = tuple(_turn(step, own) for step in with_ids)
    return Trajectory(
        example_id=str(record.get("example_id", "")), trajectory_id=str(own or f"line {line}"), turns=turns
    )


def _turn(step: Mapping[str, Any], own: str | None) -> Turn:
    tokens = step["tokens"]
    truncated = bool(step.get("is_truncated") or tokens.get("is_truncated"))
    name = step.get("trajectory_id")
    # The steps of a sub-agent have a different trajectory_id, or are marked as its calls.
    agent = "main" if not _is_sub(step) and name in (None, own) else str(name or "sub")
    return Turn(
        prompt_ids=tokens["prompt_ids"],
        completion_ids=tokens["completion_ids"],
        agent=agent,
        stop_reason=StopReason.LENGTH if truncated else StopReason.STOP,
    )


def _is_sub(step: Mapping[str, Any]) -> bool:
    return bool((step.get("extras") or {}).get("is_sub_llm_call"))


VERIFIERS = LineFormat(
    name="verifiers",
    expected='{"trajectory": [{"tokens": {"prompt_ids": [...], "completion_ids": [...], ...}, ...}, ...], ...}',
    about="rollouts of verifiers; steps without tokens are skipped",
    matches=_is_verifiers,
    trajectory=_rollout,
)
