"""Reads a task file as jobs, each with a name that is the same whenever the file is read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trajectory to be made."""

    task: str
    """The task's `id`, or else a name made from its content: a file may grow without its results being lost."""
    sample: int
    """Which of the task's trajectories."""
    digest: str
    """Digest of the task's content."""
    conversation: Mapping[str, Any]
    """The conversation that the rollout is given."""


def read_jobs(path: Path, samples: int) -> list[Job]:
    """Every task `samples` times.

    Raises:
        UsageError: no such file, a line that is no task, or an id that stands twice.
    """
    if samples < 1:
        raise UsageError(f"--samples {samples}; expected at least 1")
    jobs: list[Job] = []
    lines: dict[str, int] = {}
    copies: Counter[str] = Counter()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no UTF-8 text (byte {error.start}); expected JSON lines") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _read_task(line, f"{path}:{number}")
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        task = str(record.get("id", f"{digest}-{copies[digest]}"))
        copies[digest] += 1
        if task in lines:
            raise UsageError(f"{path}:{number}: the id {task!r} stands in line {lines[task]} too; ids are unique. For "
                             "several trajectories of one task type --samples N")  # fmt: skip
        lines[task] = number
        jobs += [
            Job(task=task, sample=k, digest=digest, conversation={**record, "id": task, "sample_index": k})
            for k in range(samples)
        ]
    if not jobs:
        raise UsageError(f"{path} holds no task")
    return jobs


def _read_task(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected a JSON object on each line ({error})") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    well_formed = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    if not messages or not well_formed:
        raise UsageError(f'{where}: expected {{"messages": [{{"role": "user", "content": ...}}]}}, found {line[:80]}')
    tools = record.get("tools", [])
    listed = tools if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in listed):
        raise UsageError(f'{where}: expected "tools": [{{"type": "function", "function": {{"name": ...}}}}], found '
                         f"{record['tools']!r:.80}")  # fmt: skip
    return dict(record)
