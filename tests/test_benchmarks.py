"""The benchmarks use what the package has: names, arguments and methods that are gone are found by mypy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "mypy", "--config-file", "benchmarks/mypy.ini")


@pytest.mark.slow
def test_benchmarks_use_what_is_there():
    found = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_a_method_that_is_gone_is_found(tmp_path: Path):
    old = tmp_path / "old.py"
    lines = ("from verbatim.rollouts.agent_loop import AgentLoop", "", "", "def f(loop: AgentLoop) -> None:")
    old.write_text("\n".join((*lines, "    loop.last_turn()", "")))
    found = subprocess.run((*COMMAND, str(old)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert '"AgentLoop" has no attribute "last_turn"' in found.stdout
