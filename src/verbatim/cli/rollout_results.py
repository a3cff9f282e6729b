"""Reads the tasks of `verbatim rollout`, and stores its results: one line per task and sample, never torn by a crash.

A line is `{"format": 1, "step": 0, "task": "7", "sample": 0, "digest": ..., "settings": {...}, "trajectory": {...}}`.
Programs that read the trajectories of a run can read these lines.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from verbatim.core.errors import UsageError
from verbatim.core.redaction import redacted
from verbatim.core.trajectory_json import trajectory_to_json
from verbatim.core.types import Trajectory
from verbatim.environments.sources import read_json_lines
from verbatim.run.kept_lines import KeptLines

_SECRETS = "secrets"
"""The key of the stored settings with a short digest of their secrets."""


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """One trajectory to play."""

    task: str
    """The task's `id`, or else a name derived from its content, so that results stay valid when the file grows."""
    sample: int
    """The number of this trajectory among the trajectories of the task."""
    digest: str
    """Digest of the task's content."""
    conversation: Mapping[str, Any]
    """The conversation to play."""


def read_jobs(path: Path, samples: int) -> list[RolloutJob]:
    """Read the tasks; each task becomes `samples` jobs.

    Raises:
        UsageError: there is no such file, a line is not a task, or an id occurs twice.
    """
    jobs: list[RolloutJob] = []
    lines: dict[str, int] = {}
    copies: Counter[str] = Counter()
    for number, record in read_json_lines(path, "task").items():
        _check_task(record, f"{path}:{number}")
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        task = str(record.get("id", f"{digest}-{copies[digest]}"))
        copies[digest] += 1
        if task in lines:
            raise UsageError(
                f"{path}:{number}: the id {task!r} is in line {lines[task]} too; ids are unique. For "
                "several trajectories of one task type --samples N"
            )
        lines[task] = number
        jobs += [
            RolloutJob(task=task, sample=k, digest=digest, conversation={**record, "id": task, "sample_index": k})
            for k in range(samples)
        ]
    return jobs


def _check_task(record: Mapping[str, Any], where: str) -> None:
    """Refuse a line that is not a task."""
    messages, tools = record.get("messages"), record.get("tools", [])
    well_formed = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    if not messages or not well_formed:
        raise UsageError(
            f'{where}: expected {{"messages": [{{"role": "user", "content": ...}}]}}, found {json.dumps(record):.80}'
        )
    listed = tools if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in listed):
        raise UsageError(
            f'{where}: expected "tools": [{{"type": "function", "function": {{"name": ...}}}}], found {tools!r:.80}'
        )


class ResultFile:
    """The results so far, to which new results are appended. Only one process at a time may open a file.

    Opening the file removes a torn last line and the records of failures, so that the tasks of these lines are played
    again.

    Args:
        path: The file, created if missing.
        settings: The settings on which results depend, stored without secrets. All results in a file share these
            settings.

    Raises:
        UsageError: another process is writing the file, or the file contains something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = _settings_to_keep(settings)
        self._done: dict[tuple[str, int], str] = {}
        self._lines = KeptLines(path, what="a result of verbatim rollout", take_in=self._take_in)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def has(self, job: RolloutJob) -> bool:
        """True if the job has a result.

        Raises:
            UsageError: the result under this id belongs to a different task.
        """
        digest = self._done.get((job.task, job.sample))
        if digest not in (None, job.digest):
            raise UsageError(
                f"{self._path} holds a result of another task with the id {job.task!r}; name another "
                "--out file, or give the task another id"
            )
        return digest is not None

    def write(self, job: RolloutJob, trajectory: Trajectory) -> None:
        """Append a result."""
        self._lines.write(
            {
                "step": 0,
                "task": job.task,
                "sample": job.sample,
                "digest": job.digest,
                "settings": self._settings,
                "trajectory": trajectory_to_json(trajectory),
            }
        )

    def _take_in(self, record: Mapping[str, Any]) -> bool:
        """Read one stored result; True if the result is a failure."""
        task, sample, digest = record["task"], record["sample"], record["digest"]
        settings, error = record["settings"], record["trajectory"]["error"]
        if settings != self._settings:
            differ = ", ".join(
                _typed(name, settings.get(name))
                for name in dict.fromkeys([*self._settings, *settings])
                if settings.get(name) != self._settings.get(name)
            )
            raise UsageError(
                f"{self._path} holds results of other settings ({differ}); use those settings, or name "
                "another --out file"
            )
        if error is None:
            self._done[task, sample] = digest
        return error is not None


def _settings_to_keep(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings without secrets. If there are secrets, the key `secrets` has 16 bits of a slow digest of them, which
    distinguishes them from other secrets but is too short to recover a key.

    >>> _settings_to_keep({"env_args": {"key": "answer"}})
    {'env_args': {'key': 'answer'}}
    """
    kept: dict[str, Any] = redacted(settings)
    if kept == settings:
        return kept
    whole = json.dumps(settings, sort_keys=True, default=str).encode()
    return {**kept, _SECRETS: hashlib.pbkdf2_hmac("sha256", whole, b"verbatim rollout", 100_000).hex()[:4]}


def _typed(name: str, value: Any) -> str:
    """A setting as typed on the command line.

    >>> _typed("max_turns", 3), _typed("score", None), _typed("env_args", {"high": 20})
    ('--max-turns 3', 'without --score', '--env-args {"high": 20}')
    """
    if name == _SECRETS:
        return "other keys or passwords in them"
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return f"without {option}"
    return f"{option} {json.dumps(value) if isinstance(value, dict) else value}"
