"""The other process in which a check plays episodes again, forked from one that has imported everything."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import pytest

import warm


@pytest.fixture
def warm_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets have an order of their own in that process too: it has another hash seed than this one."""

    def run(
        command: Sequence[str], *, given: bytes, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[bytes]:
        variables = {name: value for name, value in environment.items() if name != "PYTHONHASHSEED"}
        return warm.run(command, input=given, env=variables, timeout=timeout, capture_output=True)

    monkeypatch.setattr("verbatim.inspection.envcheck.replay.run_program", run)
