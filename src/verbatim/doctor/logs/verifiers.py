"""Reads rollouts of verifiers 0.1.8 and later: `trajectory` is a list of steps, each with one request's ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.doctor.logs.base import DAMAGED, LogFile, LoggedTrajectory, other_format
from verbatim.types import StopReason, Trajectory, Turn


class VerifiersFormat:
    """One rollout in each line."""

    name = "verifiers"
    expected = '{"trajectory": [{"tokens": {"prompt_ids": [...], "completion_ids": [...], ...}, ...}, ...], ...}'

    def recognises(self, record: Mapping[str, Any]) -> bool:
        steps = record.get("trajectory")
        return isinstance(steps, list) and all(isinstance(step, dict) and "tokens" in step for step in steps)

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        for line, _ in file.lines():
            if not self.recognises(line.record):
                file.problems.add(line.number, other_format(line.record))
                continue
            try:
                yield _rollout(line.record, line.number)
            except DAMAGED as error:
                file.damaged(line.number, error)

    def note(self) -> str:
        return "rollouts of verifiers; steps without tokens are left out"


def _rollout(record: Mapping[str, Any], line: int) -> LoggedTrajectory:
    steps = record["trajectory"]
    with_ids = [step for step in steps if step["tokens"] is not None]
    if steps and not with_ids:
        raise ValueError("no step has tokens: the engine was not asked for ids, or they were not kept")
    own = record.get("trajectory_id") or next((s.get("trajectory_id") for s in with_ids if not _is_sub(s)), None)
    turns = [_turn(step, own) for step in with_ids]
    return LoggedTrajectory(
        trajectory=Trajectory(
            example_id=str(record.get("example_id", "")), trajectory_id=str(own or f"line {line}"), turns=tuple(turns)
        ),
        line=line,
    )


def _turn(step: Mapping[str, Any], own: str | None) -> Turn:
    tokens = step["tokens"]
    cut_off = bool(step.get("is_truncated") or tokens.get("is_truncated"))
    name = step.get("trajectory_id")
    # Steps of a sub-agent have another trajectory's name, or are marked as such.
    agent = "main" if not _is_sub(step) and name in (None, own) else str(name or "sub")
    return Turn(
        prompt_ids=tokens["prompt_ids"], completion_ids=tokens["completion_ids"], agent=agent,
        stop_reason=StopReason.LENGTH if cut_off else StopReason.STOP,
    )  # fmt: skip


def _is_sub(step: Mapping[str, Any]) -> bool:
    return bool((step.get("extras") or {}).get("is_sub_llm_call"))
