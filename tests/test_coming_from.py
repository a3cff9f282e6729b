"""The examples for people who come from other trainers run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import verbatim
from e2e.tiny_runs import build_tiny_model, train_lines, workplace

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
BLOCK = re.compile(r"^```python\n(?=# (\w+)\.py\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
LISTINGS = dict(BLOCK.findall(PAGE.read_text("utf-8")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_there_is_an_example_for_each_trainer():
    assert set(LISTINGS) == {"from_trl", "from_verl", "from_tinker", "from_art"}
    headings = re.findall(r"^## (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == ["TRL", "prime-rl and verifiers", "verl", "Tinker", "ART"]


def test_the_imports_of_their_documents_have_one_of_ours():
    rows = re.findall(r"^\| `(?:prime_rl|twinkle).* \| `([\w.]+)` \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 7
    for module, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert name in importlib.import_module(module).__all__, (module, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTINGS)
def test_our_example_runs(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One step of eight rollouts, with a tiny model. It earns nothing where it has to be right: that is said."""
    monkeypatch.setattr("verbatim.logs.monitors.learning_curve.is_installed", lambda package: False)
    train = verbatim.train

    def small(**given: Any) -> Any:
        given = {
            **given,
            "model": model,
            "orchestrator": {
                **given.get("orchestrator", {}),
                "batch_size": 8,
                "group_size": 4,
                "seq_len": 384,
                "max_async_level": 0,
                "filters": [],
                "sampling": {"max_tokens": 8},
            },
        }
        given["trainer"] = {**given.get("trainer", {}), "separate_process": False}
        return train(**given, max_steps=1, run_dir="run", quiet=True)

    monkeypatch.setattr(verbatim, "train", small, raising=False)
    with workplace(tmp_path, {}) as folder:
        try:
            exec(compile(LISTINGS[name], f"{name}.py", "exec"), {"__name__": name})
        except verbatim.core.errors.NothingTrained as nothing:
            assert "the rewards of each group were equal" in str(nothing)
        (line,) = train_lines(folder / "run")
    assert line["metrics"]["rollouts"] == 8
    assert line["metrics"]["rollouts/failed"] == 0
