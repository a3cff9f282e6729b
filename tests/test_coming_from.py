"""The examples for people who come from other trainers run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import verbatim
from e2e.tiny_runs import build_tiny_model, train_lines, workplace
from verbatim.core.errors import ComponentError
from verbatim.core.imports import import_object
from verbatim.core.known_imports import IMPORTS
from verbatim.inspection.envcheck.targets import find_targets

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
BLOCK = re.compile(r"^```python\n(?=# (\w+)\.py\n)(.*?)^```$", re.MULTILINE | re.DOTALL)
LISTINGS = dict(BLOCK.findall(PAGE.read_text("utf-8")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_there_is_an_example_for_each_trainer():
    assert set(LISTINGS) == {"from_trl", "from_twinkle", "from_verl", "from_tinker", "from_art"}
    headings = re.findall(r"^## (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == ["TRL", "prime-rl and verifiers", "twinkle", "ROLL", "verl", "Tinker", "ART"]


WRITTEN_WITH = {
    "LossInputs", "LossOutputs", "AdvantageInputs", "AdvantageOutputs", "Trajectory", "SamplingParams", "Rollout",
    "MultiTurnRollout", "APIMultiTurnRollout", "OpenAI", "ToolManager", "Tool", "Template", "remote_class",
    "vLLMSampler", "Message", "InputFeature", "AgentNativeStepEnvManager", "compute_segment_masked_mean",
    "compute_discounted_returns",
}  # fmt: skip
"""Names in the documents of prime-rl, twinkle and ROLL that somebody's own module may import."""


def test_each_of_our_imports_in_the_table_is_there_and_the_page_has_the_table():
    page = PAGE.read_text("utf-8")
    for module, names in IMPORTS.items():
        cells = []
        for name, ours in names.items():
            where, _, own = ours.partition(":")
            if " " in ours:
                cells.append(f"`{name}`: {ours}")
                continue
            assert hasattr(importlib.import_module(where), own), ours
            cells.append(f"`{where}.{own}`" + (f" for `{name}`" if own != name else ""))
        assert f"| `{module}` | {', '.join(cells)} |\n" in page


def test_each_name_of_their_documents_that_is_imported_has_one_here_or_a_reason():
    assert {name for names in IMPORTS.values() for name in names} >= WRITTEN_WITH


@pytest.mark.parametrize(
    ("statement", "ours"),
    [
        ("from prime_rl.trainer.rl.loss import LossInputs, LossOutputs", "from verbatim.algorithms import LossInputs;"),
        ("from prime_rl.orchestrator.advantage import (", "from verbatim.algorithms import AdvantageOutputs"),
        ("from twinkle_agentic.rollout import MultiTurnRollout", "from verbatim.rollouts import MultiTurnRollout"),
        ("from twinkle.data_format import InputFeature", "from verbatim import TrainingSample as InputFeature"),
        ("import twinkle.data_format.sampling as s", "from verbatim.inference import SamplingParams"),
        ("from prime_rl.utils.logger import get_logger", "prime_rl.trainer.rl.loss, prime_rl.orchestrator.advantage"),
        ("from twinkle import remote_class", "remote_class is the engines have it"),
    ],
)
def test_a_pasted_module_is_answered_with_our_import(statement: str, ours: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    end = "    AdvantageInputs,\n)\n" if statement.endswith("(") else ""
    (tmp_path / "pasted.py").write_text(f'"""Mine."""\n{statement}\n{end}def mine(inputs): ...\n')
    for answered in (lambda: import_object("pasted.mine"), lambda: find_targets("pasted.py", {})):
        with pytest.raises(ComponentError) as refused:
            answered()
        said = str(refused.value)
        assert ours in said and "pasted.py:2" in said and "pip install" not in said


def test_an_import_path_of_theirs_is_answered_with_ours_and_an_unknown_package_with_pip(tmp_path: Path, monkeypatch):
    with pytest.raises(ComponentError, match=r"here: from verbatim\.algorithms import LossInputs$"):
        import_object("prime_rl.trainer.rl.loss.LossInputs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pasted_too.py").write_text("import no_such_package_anywhere\n")
    with pytest.raises(ComponentError, match="-m pip install PACKAGE"):
        import_object("pasted_too.mine")


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
