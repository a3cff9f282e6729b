"""The recipe of each bundled environment and training mode takes a few steps with a tiny model."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.tiny_runs import SIZES, assert_ledger_adds_up, build_tiny_model, train_lines, trajectory_lines
from rollouts.chat_server import call, chat_server
from verbatim.cli.main import main
from verbatim.config.recipe_files import recipes
from verbatim.environments import ENVIRONMENTS

SMALL = {
    "max-steps": "2",
    "orchestrator.batch-size": "8",
    "orchestrator.group-size": "4",
    "orchestrator.eval.episodes": "4",
    "orchestrator.seq-len": "384",
    "orchestrator.sampling.max-tokens": "32",
    "trainer.separate-process": "false",
    "orchestrator.max-async-level": "0",
    "orchestrator.filters": "[]",
    # What tiny models say earns nothing; its length differs, so that advantages do.
    "orchestrator.length-penalty.type": "tokens",
    "orchestrator.length-penalty.target": "0",
}
BUILT = {
    "warm-start.steps": "40",
    "warm-start.conversations": "60",
    **{f"model.build.{key.replace('_', '-')}": str(value) for key, value in SIZES.model_dump().items()},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(recipe: str, **settings: str) -> Path:
    """Two steps of a recipe in the current folder; the run folder."""
    options = [f"--{key.replace('__', '.').replace('_', '-')}={value}" for key, value in settings.items()]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["rl", recipe, "--run-dir", "run", *options]) == 0
    return Path("run")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`played("calculator")` is the folder of two steps of that recipe, which are made once."""
    found: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        if recipe not in found:
            with contextlib.chdir(tmp_path_factory.mktemp(recipe)):
                found[recipe] = play(recipe, **SMALL, **BUILT).resolve()
        return found[recipe]

    return of


def check(run: Path, trajectories: list[dict[str, Any]]) -> None:
    steps = [line["metrics"] for line in train_lines(run)]
    assert len(steps) == 2
    assert steps[-1]["ledger/trained"] > 0
    assert_ledger_adds_up(run)
    assert all(t["error"] is None for t in trajectories)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["calculator", "delegate", "alphabet_sort"])
def test_a_recipe_of_an_environment_takes_its_steps(recipe: str, played: Callable[[str], Path]):
    run = played(recipe)
    trajectories = trajectory_lines(run)
    assert {t["env"] for t in trajectories} == {recipe}
    check(run, trajectories)
    assert {"success_before_rl", "success_after_rl"} <= set(json.loads((run / "summary.json").read_text()))


@pytest.mark.slow
def test_the_distillation_recipe_takes_its_steps(place: Path):
    """Both folders have the same weights, so the policy begins at no distance from its teacher."""
    build_tiny_model(place / "student")
    build_tiny_model(place / "teacher")
    run = play("guess_number_opd", **SMALL, **{"model.name": "student", "orchestrator.teacher.model": "teacher"})
    check(run, trajectory_lines(run))
    assert train_lines(run)[0]["metrics"]["teacher_kl"] == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.realtime
def test_the_recipe_of_imitation_takes_its_steps(place: Path):
    """The teacher always guesses 8, so the policy learns to: what is trained is what the teacher said."""
    build_tiny_model(place / "student")
    with chat_server(lambda body: call("guess", {"number": 8}, call_id=f"c{len(body['messages'])}")) as server:
        run = play(
            "guess_number_sft", **SMALL, **{"model.name": "student", "orchestrator.teacher.base-url": server.url}
        )
    trajectories = trajectory_lines(run)
    check(run, trajectories)
    calls = [c for t in trajectories for turn in t["turns"] for c in turn["tool_calls"]]
    assert calls and all(c["arguments"] == {"number": 8} for c in calls)


@pytest.mark.slow
@pytest.mark.extras
def test_a_runs_trajectories_are_read_by_the_lines_of_their_page(
    played: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[3] / "docs" / "trajectories.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    run = played("alphabet_sort")
    capsys.readouterr()
    exec(snippet.replace("runs/guess_number/latest", str(run)), {})
    by_step = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    assert [step for step, _ in by_step] == ["1", "2"]
    rewards = [line["metrics"]["reward/mean"] for line in train_lines(run)]
    assert [float(mean) for _, mean in by_step] == pytest.approx(rewards, abs=1e-5)


@pytest.mark.slow
def test_every_task_of_our_own_has_a_recipe():
    """Other ids wrap an environment, or run tasks of another package: they have pages of their own."""
    texts = "".join(path.read_text() for path in recipes().values())
    for name in ("alphabet_sort", "calculator", "delegate", "guess_number", "terminal"):
        assert name in ENVIRONMENTS and f'id = "{name}"' in texts
