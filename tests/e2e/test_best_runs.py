"""`verbatim rl` keeps the checkpoint of the best evaluation, and ends when evaluations get no better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import verbatim
from e2e.tiny_runs import lines, train_lines
from stored_runs import MEASURED_STEPS, METRIC, measured_place
from verbatim.cli.main import main
from verbatim.logs.checkpoints import find_checkpoint, read_json

pytestmark = pytest.mark.slow

STEPS = MEASURED_STEPS
STOPPING = [
    "--max-steps",
    "50",
    "--orchestrator.eval.early-stopping.metric",
    METRIC,
    "--orchestrator.eval.early-stopping.patience",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with measured_place(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def measured(place: Path) -> Path:
    """A run that was not ended early."""
    return place / "measured"


def values(run: Path) -> list[float]:
    """The metric of each evaluation, that before the first step included."""
    evaluations = [line for line in lines(run / "metrics.jsonl") if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == list(range(len(evaluations)))
    return [line["metrics"][METRIC] for line in evaluations]


def test_the_checkpoint_of_the_best_evaluation_is_kept_and_can_be_loaded(place: Path, measured: Path):
    found = values(measured)
    step = found.index(max(found))
    assert 0 < step < STEPS, f"the best of {found} is at an end: another seed would try more"
    kept = sorted(path.name for path in (measured / "checkpoints").iterdir())
    assert kept == [f"step_{step:06d}", f"step_{STEPS:06d}"]
    assert find_checkpoint(measured, "best").step == step
    best = read_json(measured / "summary.json")["best"]
    assert best == {"step": step, "value": max(found), "metric": METRIC, "mode": "max", "env": None}
    kept, last = (measured / name / "model.safetensors" for name in ("best", "final"))
    assert kept.read_bytes() == (measured / f"checkpoints/step_{step:06d}/weights/model.safetensors").read_bytes()
    assert kept.read_bytes() != last.read_bytes()
    assert list((measured / "states").iterdir()) == []


def test_the_best_policy_measures_again_what_made_it_the_best(place: Path, measured: Path, capsys):
    assert main(["eval", "run.toml", "--model", f"{measured}@best", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["steps"] == find_checkpoint(measured, "best").step
    assert model["environments"]["spoken.Spoken"]["metrics"][METRIC] == pytest.approx(max(values(measured)), abs=1e-9)


def patience_of(found: list[float], patience: int) -> int:
    """The step after which a run of this patience ends: worked out from all evaluations of one that did not."""
    best, waited = found[0], 0
    for step, value in enumerate(found[1:], start=1):
        best, waited = (value, 0) if value > best else (best, waited + 1)
        if waited == patience:
            return step
    raise AssertionError(f"{found} would not end a run")


def patient_run(place: Path, patience: int) -> Path:
    """The run that ends when this patience is used up."""
    run = place / f"patience-{patience}"
    if not run.exists():
        assert main(["rl", "run.toml", "--run-dir", run.name, *STOPPING, str(patience)]) == 0
    return run


@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_ends_when_its_patience_is_used_up_with_status_0_and_says_so(place: Path, measured: Path, patience):
    expected, run = patience_of(values(measured), patience), patient_run(place, patience)
    assert len(train_lines(run)) == expected < STEPS
    assert values(run) == values(measured)[: expected + 1]
    summary = read_json(run / "summary.json")
    assert summary["stopped_early"].startswith(f"{METRIC} did not rise above")
    assert summary["stopped_early"].endswith(str(expected))
    said = (run / "logs/orchestrator.log").read_text()
    assert f"the run ends after {expected} of 50 steps: {METRIC} did not rise" in said
    assert (run / "final" / "model.safetensors").exists()


def test_a_resumed_run_remembers_its_patience(place: Path, measured: Path):
    """One of fewer steps, made longer, ends as the one in one go."""
    expected, run, straight = patience_of(values(measured), 2), place / "in-two", patient_run(place, 2)
    typed = ["rl", "run.toml", "--run-dir", run.name, *STOPPING, "2"]
    assert main([*typed, "--max-steps", str(expected - 1)]) == 0
    assert "stopped_early" not in read_json(run / "summary.json")
    assert main([*typed, "--resume"]) == 0
    assert len(train_lines(run)) == expected
    assert (run / "final/model.safetensors").read_bytes() == (straight / "final/model.safetensors").read_bytes()
    assert main([*typed, "--resume"]) == 0  # it has ended
    assert len(train_lines(run)) == expected
    assert len(values(run)) == expected + 1


def test_a_run_that_is_resumed_without_its_best_checkpoint_says_so_and_goes_on(place: Path, measured: Path, caplog):
    run = place / "lost"
    shutil.copytree(measured, run, symlinks=True)
    best = read_json(run / "summary.json")["best"]["step"]
    shutil.rmtree(run / f"checkpoints/step_{best:06d}")
    assert main(["rl", "run.toml", "--run-dir", run.name, "--max-steps", str(STEPS + 1), "--resume"]) == 0
    assert f"the best checkpoint, that of step {best}, is gone" in caplog.text
    assert read_json(run / "summary.json")["best"]["step"] == STEPS + 1
    assert find_checkpoint(run, "best").step == STEPS + 1
    assert (run / "best/model.safetensors").exists()


def test_from_python_the_result_says_both(place: Path):
    result = verbatim.run(
        "run.toml",
        max_steps=50,
        run_dir="python",
        quiet=True,
        orchestrator={"eval": {"early_stopping": {"metric": METRIC, "patience": 1, "min_delta": 10.0}}},
    )
    assert result.summary["steps"] == 1
    assert result.summary["stopped_early"] == (
        f"{METRIC} did not rise by more than 10 above {values(result.folder)[0]:.3f} (step 0) in the evaluation after "
        "step 1"
    )
    assert result.summary["best"]["step"] in (0, 1)


@pytest.mark.realtime
def test_a_trainer_in_a_process_of_its_own_leaves_the_same_and_nothing_else(place: Path, measured: Path):
    typed = ["rl", "run.toml", "--run-dir", "two", "--max-steps", str(STEPS), "--trainer.separate-process", "true"]
    assert main(typed) == 0
    run = place / "two"
    assert values(run) == values(measured)
    kept = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, measured)]
    assert kept[0] == kept[1]
    assert (run / "best/model.safetensors").read_bytes() == (measured / "best/model.safetensors").read_bytes()
    assert [path for path in run.rglob("optimizer.safetensors") if "checkpoints" not in path.parts] == []


def test_a_process_that_was_killed_before_it_moved_the_link_has_it_moved_by_the_next(place: Path, measured: Path):
    run = place / "unlinked"
    shutil.copytree(measured, run, symlinks=True)
    (run / "best").unlink()
    (run / ".best.tmp").symlink_to("nowhere")
    assert main(["rl", "run.toml", "--run-dir", run.name, "--max-steps", str(STEPS), "--resume"]) == 0
    assert (run / "best").resolve() == find_checkpoint(run, "best").weights.resolve()
    assert not (run / ".best.tmp").is_symlink()
    without = ["rl", "run.toml", "--run-dir", run.name, "--max-steps", str(STEPS), "--resume", "--checkpoint.keep-best"]
    assert main([*without, "null"]) == 0
    assert not (run / "best").is_symlink()
