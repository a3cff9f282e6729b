"""What a resumed run makes of keys that have changed: the table of docs/forks.md, row by row."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from e2e.tiny_runs import lines, train_lines
from stored_runs import FORKABLE_STEPS, forkable_place
from verbatim.cli.exit_status import USAGE
from verbatim.cli.main import main
from verbatim.logs.checkpoints import read_json
from verbatim.logs.monitors.trajectory_log import read_trajectories

pytestmark = pytest.mark.slow

STEPS = FORKABLE_STEPS
LR = 1e-2
"""Of the run, whose schedule is constant."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with forkable_place(tmp_path_factory) as folder:
        yield folder


def resumed(place: Path, name: str, *typed: str, steps: int = STEPS + 2, status: int = 0) -> Path:
    """The finished run, made longer, with changed keys."""
    run = place / name
    if not run.exists():
        shutil.copytree(place / "whole", run, symlinks=True)
    assert main(["rl", "run.toml", "--run-dir", name, "--resume", "--max-steps", str(steps), *typed]) == status
    return run


def rates(run: Path) -> dict[int, float]:
    """The learning rate of the last optimizer step of each step."""
    return {line["step"]: line["metrics"]["lr"] for line in train_lines(run)}


def cosine(step: int, total: int) -> float:
    return LR * (1 + math.cos(math.pi * step / total)) / 2


def rows(run: Path, step: int) -> list[tuple[str, str, int]]:
    """Example, group and seed of what a step trained on."""
    return [(t.example_id, t.group_id, t.seed) for number, t in read_trajectories(run) if number == step]


COSINE = ("--trainer.optim.schedule", "cosine")


def test_the_schedule_is_stretched_over_what_is_done_and_what_is_left(place, caplog):
    """`max_steps`, `trainer.optim.schedule`, `trainer.optimizer_steps_per_batch`: up, and down again."""
    run = resumed(place, "rates", *COSINE, "--trainer.optimizer-steps-per-batch", "2")
    assert (
        "optimizer step 7 of 10 is taken at 0.00345, but would be at 0.01 in the previous schedule of 6 steps"
        in caplog.text
    )
    assert rates(run)[7] == pytest.approx(cosine(7, 10)) and rates(run)[8] == pytest.approx(cosine(9, 10))
    caplog.clear()
    resumed(place, "rates", *COSINE, steps=10)
    assert (
        "optimizer step 11 of 12 is taken at 0.00067, but would be at 0 in the previous schedule of 10 steps"
        in caplog.text
    )
    assert rates(run)[9] == pytest.approx(cosine(10, 12)) and rates(run)[10] == pytest.approx(cosine(11, 12))
    assert "would be at" not in resume_says(place, "rates", caplog, *COSINE, steps=10)


def resume_says(place, name, caplog, *typed, steps):
    caplog.clear()
    resumed(place, name, *typed, steps=steps)
    return caplog.text


def test_fewer_steps_than_are_done_are_refused(place, capsys):
    resumed(place, "fewer", steps=STEPS - 1, status=USAGE)
    assert f"has done {STEPS} steps, and max_steps = {STEPS - 1}" in capsys.readouterr().err


def test_a_fork_takes_another_number_of_optimizer_steps_too(place):
    typed = ["--trainer.optimizer-steps-per-batch", "2", "--max-steps", "5", *COSINE]
    assert main(["rl", "--fork", "whole@4", "--run-dir", "fork", *typed]) == 0
    assert rates(place / "fork")[5] == pytest.approx(cosine(5, 6))


def test_a_group_in_flight_has_the_new_size_and_a_batch_too(place):
    run = resumed(place, "sizes", "--orchestrator.batch-size", "6", "--orchestrator.group-size", "2")
    for step in (7, 8):
        found = rows(run, step)
        assert len(found) == 6 and len({group for _, group, _ in found}) == 3
    assert len(rows(run, STEPS)) == 8


def test_another_seed_gives_other_episodes_of_the_examples_that_were_next(place):
    same, other = resumed(place, "same"), resumed(place, "seed", "--seed", "5")
    for step in (7, 8):
        assert [row[:2] for row in rows(other, step)] == [row[:2] for row in rows(same, step)]
        assert not {row[2] for row in rows(other, step)} & {row[2] for row in rows(same, step)}


def test_intervals_count_from_the_first_step_of_the_run(place):
    run = resumed(place, "interval", "--orchestrator.eval.interval", "3", "--checkpoint.interval", "4", steps=10)
    assert [line["step"] for line in lines(run / "metrics.jsonl") if line["kind"] == "eval"] == [0, 2, 4, 6, 9, 10]
    assert {"step_000008", "step_000010"} <= {path.name for path in (run / "checkpoints").iterdir()}
    assert "step_000007" not in {path.name for path in (run / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("seed", "3", "orchestrator.eval.seed"),
        ("episodes", "5", "orchestrator.eval.episodes"),
        ("examples", "3", "orchestrator.eval.examples"),
    ],
)
def test_evaluations_of_other_episodes_are_not_compared_with_those_before(place, caplog, key, value, named):
    run = resumed(place, f"eval-{key}", f"--orchestrator.eval.{key}", value)
    assert f"{named} changed, so evaluations now play different episodes" in caplog.text
    assert read_json(run / "summary.json")["best"]["step"] == STEPS + 2


def test_other_arguments_of_the_evaluated_environment_are_other_episodes(place, caplog):
    resumed(place, "eval-args", "--orchestrator.train.env.0.args.delay", "0.001")
    assert "the evaluated environments changed, so evaluations now play different episodes" in caplog.text


def test_another_model_or_adapters_are_refused(place, capsys):
    resumed(place, "other-model", "--model.name", str(place / "whole/final"), status=USAGE)
    assert "trained a different model" in capsys.readouterr().err
    resumed(place, "adapters", "--trainer.lora.r", "4", status=USAGE)


def test_what_somebody_put_into_the_folders_of_a_run_stays(place):
    """Made longer, the run writes `final/` anew and retires older checkpoints."""
    run = place / "notes"
    shutil.copytree(place / "whole", run, symlinks=True)
    oldest = min(path.name for path in (run / "checkpoints").glob("step_*"))
    (run / "final/README.md").write_text("a model card\n")
    (run / "checkpoints" / oldest / "why.txt").write_text("before the rate changed\n")
    before = (run / "final/model.safetensors").read_bytes()
    resumed(place, "notes", "--checkpoint.keep-last", "1")
    assert (run / "final.kept-1/README.md").read_text() == "a model card\n"
    assert (run / "final.kept-1/model.safetensors").read_bytes() == before
    assert sorted(path.name for path in (run / "final").iterdir()) == sorted(
        path.name for path in (place / "whole/final").iterdir()
    )
    notes = list((run / "checkpoints").rglob("why.txt"))
    assert [note.read_text() for note in notes] == ["before the rate changed\n"]
    assert notes[0].parent.name == f"{oldest}.kept-1"


def test_a_warm_start_is_not_made_later(place):
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]
    (place / "said.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    run = resumed(place, "warm", "--warm-start.steps", "3", "--warm-start.data", str(place / "said.jsonl"))
    assert not (run / "warm_start").exists() and len(train_lines(run)) == STEPS + 2


def test_every_row_of_the_page_is_tested():
    text = (Path(__file__).parents[2] / "docs/forks.md").read_text()
    table = text.partition("## Changed keys")[2].partition("\n## ")[0]
    keys = set(re.findall(r"`([\w.*]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert keys == {
        "max_steps",
        "trainer.optimizer_steps_per_batch",  # here, and tests/trainer/test_resumed_rates.py
        "trainer.optim.lr",
        "schedule",
        "min_lr_ratio",
        "warmup_steps",
        "weight_decay",
        "beta1",
        "beta2",
        "eps",
        "max_grad_norm",  # tests/trainer/test_trainer_resume.py
        "orchestrator.batch_size",
        "group_size",
        "oversampling_factor",
        "max_async_level",
        "max_off_policy_steps",
        "orchestrator.train.env",
        "orchestrator.buffer",  # tests/algorithms/curriculum/test_changed_rules.py
        "seed",
        "orchestrator.eval.interval",
        "checkpoint.interval",
        "orchestrator.eval.seed",
        "episodes",
        "examples",
        "env",
        "checkpoint.keep_best",
        "orchestrator.eval.early_stopping",
        # the last two: tests/run/orchestrator/test_eval_progress.py, tests/e2e/test_best_runs.py
        "model",
        "trainer.lora",
        "warm_start",
        "trainer.reference.model",  # tests/e2e/test_reference_runs.py
    }
