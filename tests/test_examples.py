"""The notebook and the scripts in examples/ run, each in a process of its own with nothing of the tests in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import warm

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.realtime


def run(script: Path, place: Path) -> str:
    done = warm.run(
        [sys.executable, str(script)],
        cwd=place,
        capture_output=True,
        text=True,
        env={**os.environ, "MPLBACKEND": "agg"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return str(done.stdout)


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path):
    """As in a kernel: in one namespace, in which an event loop is running."""
    script = (
        "import asyncio, json, sys\n"
        "async def kernel():\n"
        "    names = {'__name__': 'notebook'}\n"
        "    for number, cell in enumerate(json.load(open('cells.json'))):\n"
        "        exec(compile(cell, f'cell {number}', 'exec'), names)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(kernel())\n"
    )
    (tmp_path / "cells.json").write_text(json.dumps(cells()))
    (tmp_path / "kernel.py").write_text(script)
    out = run(tmp_path / "kernel.py", tmp_path)
    assert "['track', 'act']" in out
    assert "in 5 steps" in out
    assert "tokens trained; ['" in out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("train", "the model is in"), ("run", "tokens trained")])
def test_a_script_runs(name: str, said: str, tmp_path: Path):
    assert said in run(EXAMPLES / f"{name}.py", tmp_path)
