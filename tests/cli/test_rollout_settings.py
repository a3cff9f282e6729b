"""A file of results tells settings apart, those with keys too, and keeps no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verbatim.cli.rollout_results import ResultFile, RolloutJob
from verbatim.core.errors import UsageError
from verbatim.core.types import Trajectory, Turn

JOB = RolloutJob(task="1", sample=0, digest="d", conversation={})


def write_one(path: Path, args: dict[str, Any]) -> None:
    with ResultFile(path, {"env_args": args}) as results:
        results.write(JOB, Trajectory(example_id="1", turns=[Turn(prompt_ids=[1], completion_ids=[2])]))


@pytest.mark.parametrize(
    ("name", "first", "second", "said"),
    [
        ("key", "answer", "question", '--env-args {"key": "answer"}'),
        ("password", "swordfish", "marlin-7", "other keys or passwords in them"),
        ("command", "agent --api-key a1b2c3d4", "agent --api-key d4c3b2a1", "other keys or passwords in them"),
    ],
)
def test_results_of_settings_that_differ_are_not_mixed(tmp_path: Path, name: str, first: str, second: str, said: str):
    path = tmp_path / "o.jsonl"
    write_one(path, {name: first})
    with ResultFile(path, {"env_args": {name: first}}) as results:
        assert results.has(JOB)
    with pytest.raises(UsageError) as caught:
        ResultFile(path, {"env_args": {name: second}})
    assert f"holds results of other settings ({said})" in str(caught.value)
    if name != "key":
        assert first not in path.read_text()
