"""What a checkpoint says for itself of whether a fork of it would train anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbatim.config import dump_config, make_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.logs.checkpoints import Checkpoint, write_json, write_loop_state
from verbatim.run.build import make_progress
from verbatim.run.fork import Fork, check_fork
from verbatim.run.tables import component_tables


def configured(patience: int) -> RunConfig:
    return make_config(
        {
            "max_steps": 50,
            "model": {"name": "m"},
            "orchestrator": {
                "train": {"env": [{"id": "guess_number"}]},
                "eval": {"early_stopping": {"patience": patience}},
            },
        },
        tables=component_tables(),
    )


def stopped_after_20(run: Path) -> Fork:
    """A checkpoint of a run that ended early: two evaluations were no better than the one of step 0."""
    folder = run / "checkpoints/step_000020"
    (folder / "trainer").mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(configured(2)))
    write_json(folder / "trainer/trainer.json", {"num_optimizer_steps": 20})
    played = make_progress(configured(2)).played
    stopping = {"best": 0.5, "best_step": 0, "since": [10, 20], "metric": "success", "mode": "max", "env": None}
    write_loop_state(
        folder,
        {
            "dispatcher": {"schedule": {"pools": {"easy": [], "hard": [], "recent": {}}}, "held": []},
            "evaluations": {"last": 20, "best": None, "early_stopping": stopping, "played": played},
        },
    )
    return Fork(run=run, checkpoint=Checkpoint(step=20, folder=folder))


def test_a_fork_that_would_end_early_at_once_is_refused_with_what_to_type(tmp_path: Path):
    fork = stopped_after_20(tmp_path)
    with pytest.raises(UsageError) as refused:
        check_fork(fork, configured(2))
    assert "success did not rise above 0.500 (step 0) in the evaluations after steps 10, 20" in str(refused.value)
    assert "--orchestrator.eval.early-stopping.patience 5" in str(refused.value)
    assert check_fork(fork, configured(5)).step == 20


def test_a_damaged_configuration_of_the_checkpoint_is_named(tmp_path: Path):
    """It is read before anything else where the configuration says dtype = "auto"."""
    fork = stopped_after_20(tmp_path)
    assert fork.tables["model"] == {"name": "m"}
    fork.config_file.write_text("[model\n")
    with pytest.raises(CheckpointError, match=r"step_000020/config.toml is not TOML"):
        _ = fork.tables
