"""The other process in which a check plays episodes again, forked from one that has imported everything."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import warm


@pytest.fixture
def warm_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets have an order of their own in that process too: it has another hash seed than this one."""

    def run(command: list[str], *, env: Mapping[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
        return warm.run(command, env={name: v for name, v in env.items() if name != "PYTHONHASHSEED"}, **more)

    forking = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("verbatim.inspection.envcheck.replay.subprocess", forking)
