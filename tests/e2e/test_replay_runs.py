"""`verbatim rl --replay STEP`: a step trained again from what is stored, without a sampler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from e2e.tiny_runs import snapshot, train_lines
from stored_runs import FORKABLE_STEPS, forkable_place, tiny_toml
from verbatim.cli.main import main
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import read_json
from verbatim.logs.outcomes.files import OutcomeFolder, files_in, read_outcomes
from verbatim.run.replay import replay

pytestmark = pytest.mark.slow

STEPS = FORKABLE_STEPS
NOT_KEPT = (1, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with forkable_place(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run with checkpoints of the steps 0, 2, 4, 5 and 6."""
    for step in NOT_KEPT:
        shutil.rmtree(place / f"whole/checkpoints/step_{step:06d}")
    return (place / "whole").rename(place / "run")


def copied(place: Path, run: Path, name: str) -> Path:
    shutil.copytree(run, place / name, symlinks=True)
    return place / name


@pytest.mark.parametrize(("step", "base"), [(1, 0), (2, 0), (5, 4)])
def test_a_step_replays_bit_for_bit_from_the_checkpoint_before_it_and_over_the_steps_between(run: Path, step, base):
    before = snapshot(run)
    found = replay(run, step)
    assert (found.step, found.checkpoint, found.changes) == (step, base, ())
    assert found.is_exact and found.is_same
    stored = train_lines(run)[step - 1]["metrics"]
    assert found.num_tokens == stored["trained_tokens"] == found.logprobs.num_compared > 20
    assert found.metrics["loss"].replayed == stored["loss"] and found.metrics["grad_norm"].replayed > 0
    assert {"loss", "grad_norm", "lr", "entropy", "mismatch_kl", "num_micro_batches"} <= set(found.metrics)
    if step in NOT_KEPT:
        assert found.weights is None  # there is no checkpoint of it
    else:
        assert found.weights.is_exact and found.weights.num_parameters > 5
    assert snapshot(run) == before


def test_the_command_prints_it_and_writes_nothing(run: Path, capsys):
    before = snapshot(run)
    assert main(["rl", "--replay", "2", "--run-dir", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"replay      step 2 of {run.resolve()}, from the checkpoint of step 0, and 1 steps on the way" in out
    assert "logprobs    the same bit for bit, of " in out and "gradients   the same bit for bit, of " in out
    assert "weights     the same bit for bit, all " in out
    assert "step 2 replays bit for bit" in out
    assert snapshot(run) == before


def test_another_learning_rate_and_another_number_of_optimizer_steps_are_shown(run: Path):
    found = replay(run, 5, ["--trainer.optim.lr", "0.005", "--trainer.optimizer-steps-per-batch", "2"])
    assert found.changes == ("trainer.optim.lr: 0.01 -> 0.005", "trainer.optimizer_steps_per_batch: 1 -> 2")
    assert (found.metrics["lr"].stored, found.metrics["lr"].replayed) == (0.01, 0.005)
    assert (found.metrics["num_optimizer_steps"].stored, found.metrics["num_optimizer_steps"].replayed) == (1, 2)
    assert not found.is_exact and found.weights.num_different > 0


def test_another_loss_has_the_logprobs_of_then_and_other_gradients(run: Path, capsys):
    found = replay(run, 5, ["--trainer.loss.type", "ppo"])
    assert found.gradients.num_different > 0
    assert found.logprobs.is_exact and found.logprobs.num_compared == found.num_tokens > 20
    assert main(["rl", "--replay", "5", "--run-dir", str(run), "--trainer.loss.type", "ppo"]) == 0
    out = capsys.readouterr().out
    assert "changed     trainer.loss.type: 'default' -> 'ppo'" in out
    assert "step 5 with 1 changed key" in out


def test_credit_filters_and_lengths_are_applied_to_the_batch_again(run: Path):
    """The same credit again gives the step of then; another one other gradients; a shorter bound fewer tokens."""
    same = replay(run, 5, ["--orchestrator.max-off-policy-steps", "7"])
    assert same.changes and same.is_exact
    other = replay(run, 5, ["--orchestrator.advantage.type", "rloo"])
    assert other.logprobs.num_compared == same.num_tokens and other.gradients.num_different > 0
    outcomes = [outcome for _, outcome in read_outcomes(files_in(run / "trajectories")[5])]
    shortest = min(turn.path.length for outcome in outcomes for turn in outcome.trajectory.turns)
    none = replay(run, 5, ["--orchestrator.seq-len", str(shortest - 1)])
    assert (none.num_tokens, none.logprobs.num_only_stored) == (0, same.num_tokens)
    assert not none.is_same and none.weights.num_different > 0


def test_a_change_on_the_disk_is_found_in_its_trajectory_and_token(place: Path, run: Path, capsys):
    """One stored logprob of the trainer, one advantage."""
    other = copied(place, run, "other")
    path = files_in(other / "trajectories")[5]
    outcomes = [outcome for _, outcome in read_outcomes(path)]
    marked = next(i for i, outcome in enumerate(outcomes) if outcome.num_trained_tokens)
    said = [None if array is None else array.copy() for array in outcomes[marked].trainer_logprobs]
    said[0][3] += np.float32(0.5)
    import dataclasses

    outcomes[marked] = dataclasses.replace(outcomes[marked], trainer_logprobs=tuple(said))
    OutcomeFolder(other / "trajectories").write(5, outcomes)
    found = replay(other, 5)
    trajectory = outcomes[marked].trajectory
    assert (found.logprobs.num_different, found.logprobs.trajectory_id) == (1, trajectory.trajectory_id)
    assert (found.logprobs.turn, found.logprobs.position) == (0, 3)
    assert found.logprobs.token_id == trajectory.turns[0].completion_ids[3]
    assert found.logprobs.stored - found.logprobs.replayed == pytest.approx(0.5)
    assert not found.is_same and found.gradients.is_exact
    assert main(["rl", "--replay", "5", "--run-dir", str(other)]) == 1
    out = capsys.readouterr().out
    assert f"trajectory {trajectory.trajectory_id}, turn 0, token 3 (id {found.logprobs.token_id})" in out
    assert "step 5 does not replay" in out


def test_one_row_in_another_place_is_no_other_step_but_other_weights_are(place: Path, run: Path):
    other = copied(place, run, "moved")
    weights = other / "checkpoints/step_000004/weights/model.safetensors"
    from safetensors.numpy import load_file, save_file

    from verbatim.logs.checkpoints import write_manifest

    tensors = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name] * np.float32(1.5)
    save_file(tensors, weights, metadata={"format": "pt"})
    write_manifest(weights.parents[1], {"step": 4})
    found = replay(other, 5)
    assert found.logprobs.num_different > 10 and not found.is_same
    assert found.weights.parameter is not None and found.weights.largest > 1e-3


# ---- what is missing


def test_which_steps_can_be_replayed_is_said(place: Path, run: Path, capsys):
    other = copied(place, run, "less")
    for step in (0, 4, 6):
        shutil.rmtree(other / f"checkpoints/step_{step:06d}")
    (other / "trajectories/step-000004.parquet").unlink()
    assert main(["rl", "--replay", "1", "--run-dir", str(other)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 1 of" in said and "it needs a checkpoint before it" in said
    assert "steps that can be replayed: 3, 6 (checkpoints: 2, 5; files of trajectories: 1-3, 5-6)" in said
    for step in (4, 5, 7):
        with pytest.raises(UsageError, match=rf"step {step} of .* cannot be replayed"):
            replay(other, step)
    assert replay(other, 3).is_exact


def test_a_damaged_checkpoint_is_not_begun_at(place: Path, run: Path):
    other = copied(place, run, "damaged")
    (other / "checkpoints/step_000004/trainer/optimizer.safetensors").write_bytes(b"x")
    found = replay(other, 5)
    assert (found.checkpoint, found.is_exact) == (2, True)


def test_a_file_that_has_not_all_of_the_batch_is_refused(place: Path, run: Path):
    other = copied(place, run, "part")
    path = files_in(other / "trajectories")[5]
    outcomes = [outcome for _, outcome in read_outcomes(path)]
    OutcomeFolder(other / "trajectories").write(5, outcomes[:4])
    trained = sum(outcome.num_trained_tokens for outcome in outcomes)
    with pytest.raises(UsageError, match=rf"has \d+ of the {trained} tokens that step 5 trained: .*trajectory_share"):
        replay(other, 5)


def test_a_file_of_other_columns_is_refused(place: Path, run: Path):
    other = copied(place, run, "foreign")
    pq.write_table(pa.table({"a": [1]}), files_in(other / "trajectories")[5])
    with pytest.raises(UsageError, match="has no format number"):
        replay(other, 5)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--replay", "1"], "--replay needs the run's folder: --run-dir runs/NAME/latest"),
        (["--replay", "1", "--run-dir", "nowhere"], "there is no run in"),
        (["--replay", "1", "--run-dir", "model"], "there is no run in"),
        (["--replay", "99", "--run-dir", "run"], "steps that can be replayed: 1-6 (checkpoints: 0, 2, 4-6;"),
        (["run.toml", "--replay", "1", "--run-dir", "run"], "leave out FILE"),
        (["--replay", "1", "--run-dir", "run", "--resume"], "leave out --resume"),
        (["--replay", "1", "--run-dir", "run", "--fork", "run"], "leave out --fork"),
        (["--replay", "1", "--run-dir", "run", "--seed", "7"], "seed: 0 -> 7 would have no effect; keys that may"),
        (["--replay", "1", "--run-dir", "run", "--model.name", "x"], "would have no effect"),
        (["--replay", "1", "--run-dir", "run", "--trainer.lora.r", "4"], "would have no effect"),
        (
            [
                "--replay",
                "1",
                "--run-dir",
                "run",
                "--trainer.separate-process",
                "true",
                "--trainer.parallel.processes",
                "2",
            ],
            "would have no effect; keys that may change: trainer.* except trainer.lora and trainer.parallel (a "
            "replay trains in one process), ",
        ),
        (["--replay", "1", "--run-dir", "run", "--orchestrator.group-size", "2"], "would have no effect"),
        (["--replay", "1", "--run-dir", "run", "--trainer.optim.lrr", "1"], 'unknown key "lrr"'),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_what_to_type(run: Path, typed, said: str, capsys):
    assert main(["rl", *typed]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_run_that_is_at_work_can_be_replayed(place: Path, run: Path):
    """Its folder is locked by another process, or by this one."""
    from verbatim.logs.checkpoints.lock import FolderLock

    lock = FolderLock(run, "orchestrator.lock")
    try:
        assert replay(run, 5).is_exact
    finally:
        lock.release()


def test_the_result_is_printed_as_json(run: Path, capsys):
    assert main(["rl", "--replay", "5", "--run-dir", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["checkpoint"], said["is_exact"]) == (5, 4, True)
    assert said["metrics"]["loss"]["stored"] == train_lines(run)[4]["metrics"]["loss"]
    assert read_json(run / "summary.json")["steps"] == STEPS


# ---- other runs


KINDS = {
    "overlapping": (
        ("max_async_level = 0", "max_async_level = 1"),
        ("separate_process = false", "num_threads = 1"),
        ("[trainer.optim]", 'packing = "tree"\noptimizer_steps_per_batch = 2\n[trainer.optim]'),
    ),
    "taught adapters": (
        ("[trainer.optim]", "[trainer.loss]\nkl_ref_tau = 0.1\n[trainer.lora]\nr = 4\n[trainer.optim]"),
        ("sampling =", 'training_mode = "opd"\nteacher = { model = "MODEL" }\nsampling ='),
    ),
}


@pytest.mark.extras
@pytest.mark.parametrize("kind", [pytest.param("overlapping", marks=pytest.mark.realtime), "taught adapters"])
def test_steps_of_other_runs_replay_too(place: Path, kind: str):
    """Two processes that overlap, which pack trees and take two optimizer steps; adapters beside a reference, and a
    teacher, whose logprobs are stored."""
    text = tiny_toml(place / "model", "[checkpoint]\ninterval = 1\nkeep_last = 10\n", steps=2, env="lots.Lots")
    for old, new in KINDS[kind]:
        assert old in text
        text = text.replace(old, new.replace("MODEL", str(place / "model")))
    (place / f"{kind}.toml").write_text(text)
    assert main(["rl", f"{kind}.toml", "--run-dir", kind]) == 0
    run = place / kind
    before = snapshot(run)
    found = replay(run, 2)
    assert found.num_tokens > 20 and found.weights is not None
    assert found.is_same and found.is_exact, found
    if kind == "overlapping":
        half = replay(run, 1, ["--trainer.optim.lr", "0.005"])
        assert half.logprobs.num_different > 0  # those of the second optimizer step
        assert half.metrics["num_optimizer_steps"].stored == 2 and half.metrics["trained_tokens"].is_exact
    else:
        outcomes = [
            outcome for _, outcome in read_outcomes(files_in(run / "trajectories")[2]) if outcome.num_trained_tokens
        ]
        assert all(len(outcome.teacher_logprobs[0]) == outcome.num_trained_tokens for outcome in outcomes)
        assert "ref_kl" in found.metrics
    assert snapshot(run) == before
