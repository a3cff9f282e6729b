"""Training by trajectories and by turns: as many optimizer steps, the same schedule, the same gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from e2e.tiny_runs import assert_ledger_adds_up, train_lines, trajectory_lines, workplace
from verbatim.cli.main import main

RECIPE = Path(__file__).parents[2] / "recipes" / "guess_number.toml"
STEPS = 3
LR = 1e-3
SMALL = [
    "--max-steps", str(STEPS), "--orchestrator.eval", "null", "--trainer.separate-process", "false",
    "--model.build", "{hidden_size = 32, num_layers = 1, num_heads = 2, num_kv_heads = 1, intermediate_size = 64, "
    "vocab_size = 512}",
    "--warm-start.steps", "150", "--warm-start.conversations", "200", "--warm-start.optim.lr", "1e-2",
    "--orchestrator.batch-size", "16", "--orchestrator.group-size", "8", "--orchestrator.max-async-level", "0",
    "--inference.torch.deterministic", "true", "--inference.torch.max-batch-size", "16",
    "--trainer.optimizer-steps-per-batch", "1",
    "--trainer.optim", f'{{lr = {LR}, schedule = "linear", max_grad_norm = 1e9}}',
]  # fmt: skip
IPA = [
    "--trainer.loss.type",
    "ipa",
    "--orchestrator.advantage",
    '{type = "chunk_returns", gamma = 0.5, baseline = "group"}',
]
LOSSES = {"default": [], "ipa": IPA}
Run = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """The folder of a run by mode and loss, trained when it is first asked for. All start from the same weights."""
    place = tmp_path_factory.mktemp("modes")

    def train(folder: Path, *options: str) -> Path:
        with workplace(place, {}), contextlib.redirect_stdout(None):
            assert main(["rl", str(RECIPE), *SMALL, *options, "--run-dir", str(folder)]) == 0
        return folder

    @cache
    def started() -> str:
        return str(train(place / "start", "--max-steps", "1") / "warm_start")

    @cache
    def run(mode: str, loss: str) -> Path:
        start = ["--model", f'{{name = "{started()}"}}', "--warm-start", "null"]
        return train(place / f"{mode}-{loss}", *start, *LOSSES[loss], "--orchestrator.formulate-mode", mode)

    return run


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [line["metrics"] for line in train_lines(folder)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", ["traj", "step"])
@pytest.mark.slow
def test_each_batch_is_one_optimizer_step_and_the_schedule_ends_where_it_should(run: Run, mode: str, loss: str):
    steps = metrics(run(mode, loss))
    assert [step["num_optimizer_steps"] for step in steps] == [1] * STEPS
    # A straight line that reaches 0 as the last step is done.
    assert [step["lr"] for step in steps] == pytest.approx([LR, LR * 2 / 3, LR / 3])
    assert_ledger_adds_up(run(mode, loss))


@pytest.mark.slow
def test_a_turn_is_a_sample_in_the_one_and_a_part_of_its_trajectory_in_the_other(run: Run):
    traj, step = (metrics(run(mode, "default"))[0]["samples"] for mode in ("traj", "step"))
    trained = [t for t in trajectory_lines(run("step", "default")) if t["group_id"] in ("train-0", "train-1")]
    assert traj <= len(trained)
    assert traj < step <= sum(len(trajectory["turns"]) for trajectory in trained)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_both_take_the_same_gradient_of_the_same_rollouts(run: Run, loss: str):
    traj, step = (metrics(run(mode, loss))[0] for mode in ("traj", "step"))
    assert traj["trained_tokens"] == step["trained_tokens"] > 0
    assert traj["grad_norm"] > 0
    for name in ("loss", "grad_norm"):
        assert step[name] == pytest.approx(traj[name], rel=1e-5, abs=1e-8)
