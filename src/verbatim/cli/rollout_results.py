"""Reads the tasks of `verbatim rollout`, and writes and reads its results: one whole line per task and sample, also
after a crash.

A line of the results is `{"format": 1, "step": 0, "task": "7", "sample": 0, "digest": ..., "settings": {...},
"trajectory": {...}}`, so that whatever reads the trajectories of a run reads these.
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


@dataclass(frozen=True, kw_only=True)
class RolloutJob:
    """One trajectory to be made."""

    task: str
    """The task's `id`, or else a name made from its content: a file may grow without its results being lost."""
    sample: int
    """Which of the task's trajectories."""
    digest: str
    """Digest of the task's content."""
    conversation: Mapping[str, Any]
    """The conversation that the rollout is given."""


def read_jobs(path: Path, samples: int) -> list[RolloutJob]:
    """Every task `samples` times.

    Raises:
        UsageError: no such file, a line that is no task, or an id that stands twice.
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
                f"{path}:{number}: the id {task!r} stands in line {lines[task]} too; ids are unique. For "
                "several trajectories of one task type --samples N"
            )
        lines[task] = number
        jobs += [
            RolloutJob(task=task, sample=k, digest=digest, conversation={**record, "id": task, "sample_index": k})
            for k in range(samples)
        ]
    return jobs


def _check_task(record: Mapping[str, Any], where: str) -> None:
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
    """Knows what is done, and appends what gets done. For one process at a time.

    What an earlier process left torn, or what failed there, is taken out first: those tasks are done again.

    Args:
        path: The file; made if it is not there.
        settings: What the results depend on beside their task, kept without secrets; a file holds results of one kind
            only.

    Raises:
        UsageError: another process writes it, or it holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = _settings_to_keep(settings)
        self._done: dict[tuple[str, int], str] = {}
        self._lines = KeptLines(path, what="result of verbatim rollout", take_in=self._take_in)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def has(self, job: RolloutJob) -> bool:
        """Whether it is done.

        Raises:
            UsageError: something else of that name is.
        """
        digest = self._done.get((job.task, job.sample))
        if digest not in (None, job.digest):
            raise UsageError(
                f"{self._path} holds a result of another task with the id {job.task!r}; name another "
                "--out file, or give the task another id"
            )
        return digest is not None

    def write(self, job: RolloutJob, trajectory: Trajectory) -> None:
        """Append one."""
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
        """Take in what is there; whether it is a failure."""
        task, sample, digest = record["task"], record["sample"], record["digest"]
        settings, error = record["settings"], record["trajectory"]["error"]
        if settings != self._settings:
            differ = ", ".join(
                _typed(name, settings.get(name))
                for name in dict.fromkeys([*self._settings, *settings])
                if settings.get(name) != self._settings.get(name)
            )
            raise UsageError(
                f"{self._path} holds results of other settings ({differ}); type them again, or name another --out file"
            )
        if error is None:
            self._done[task, sample] = digest
        return error is not None


def _settings_to_keep(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings without secrets; where they have some, `secrets` tells them from others: 16 bits of a slow digest,
    from which nobody finds a key.

    >>> _settings_to_keep({"env_args": {"key": "answer"}})
    {'env_args': {'key': 'answer'}}
    """
    kept: dict[str, Any] = redacted(settings)
    if kept == settings:
        return kept
    whole = json.dumps(settings, sort_keys=True, default=str).encode()
    return {**kept, _SECRETS: hashlib.pbkdf2_hmac("sha256", whole, b"verbatim rollout", 100_000).hex()[:4]}


def _typed(name: str, value: Any) -> str:
    """A setting as it is typed.

    >>> _typed("max_turns", 3), _typed("score", None), _typed("env_args", {"high": 20})
    ('--max-turns 3', 'without --score', '--env-args {"high": 20}')
    """
    if name == _SECRETS:
        return "other keys or passwords in them"
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return f"without {option}"
    return f"{option} {json.dumps(value) if isinstance(value, dict) else value}"
