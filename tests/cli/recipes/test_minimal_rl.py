"""The recipes run, and are short enough to be read."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from e2e.tiny_runs import build_tiny_model
from verbatim.cli.main import main

RECIPES = Path(__file__).parents[3] / "recipes"
STEP_LINE = re.compile(r"step +(\d+)  reward (\d\.\d+)  trained tokens +(\d+)  grad norm (\d+\.\d+)")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=640)


def load_minimal_rl() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_rl", RECIPES / "minimal_rl.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["minimal_rl.py", *(file.name for file in sorted(RECIPES.glob("*.toml")))])
def test_a_recipe_is_short(name: str):
    most = {"minimal_rl.py": 250, "guess_number.toml": 40}.get(name, 50)
    assert len((RECIPES / name).read_text().splitlines()) <= most


@pytest.mark.slow
@pytest.mark.realtime  # one of them looks for a sandbox
@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_config_accepts_the_recipe_and_prints_what_it_says(
    file: Path, model_folder: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # an environment may lie beside its recipe
    shutil.copytree(model_folder, tmp_path / "model")
    found = ["--inference.vllm.urls", '["http://127.0.0.1:8000"]'] if "vllm" in file.name else []  # needs no vLLM here
    model = tomllib.loads(file.read_text())["model"].get("name", "")
    if "runs/" in model or "smollm2" in model:  # another run's, or one that `verbatim models get` brings
        found += ["--model.name", "model", "--orchestrator.seq-len", "640"]
        found += ["--orchestrator.teacher.model", "model"] if "opd" in file.name else []
    assert main(["config", str(file), *found]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    said = tomllib.loads(file.read_text())
    assert printed["max_steps"] == said["max_steps"]
    (shown,), (given,) = (config["orchestrator"]["train"]["env"] for config in (printed, said))
    assert {key: shown[key] for key in given} == given
    assert printed["trainer"]["optim"]["lr"] == said["trainer"]["optim"]["lr"]


@pytest.mark.slow
def test_the_minimal_loop_trains(capsys):
    """30 supervised steps are enough for some games to be won and some to be lost, so that there is a gradient."""
    reward = load_minimal_rl().main(["--steps", "2", "--warm-start-steps", "30", "--groups", "2"])
    steps = STEP_LINE.findall(capsys.readouterr().out)
    assert [int(number) for number, *_ in steps] == [1, 2]
    assert 0 <= reward <= 1
    assert steps[-1][1] == f"{reward:.3f}"
    assert any(int(trained) > 0 and float(norm) > 0 for _, _, trained, norm in steps)
