"""A run with low-rank adapters through a real vLLM server, resumed once: `make test-vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.test_vllm_runs import RUN, model
from e2e.tiny_runs import LOTS, assert_ledger_adds_up, train_lines, trajectory_lines, workplace
from verbatim.cli.main import main

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::FutureWarning")]
__all__ = ["model"]


def test_a_run_with_adapters_is_sampled_by_vllm_and_resumed(tmp_path: Path, model: Path):
    with workplace(tmp_path, {"lots": LOTS}) as place:
        lora = "[trainer.lora]\nr = 8\nalpha = 4\n[trainer.optim]"
        text = RUN.replace("[trainer.optim]", lora).replace("lr = 1e-3", "lr = 1e-2")
        (place / "run.toml").write_text(text.format(model=model, steps=3, replicas=1))
        assert main(["rl", "run.toml", "--run-dir", "mine"]) == 0
        assert main(["rl", "run.toml", "--run-dir", "mine", "--resume", "--max-steps", "5"]) == 0
        run = place / "mine"
        steps = train_lines(run)
        assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
        assert all(line["metrics"]["grad_norm"] > 0 for line in steps)
        for at in (0, 3):  # what version 0, and version 3 after the resumption, sampled and trained themselves
            assert steps[at]["metrics"]["mismatch_kl"] < 1e-8
        turns = [turn for t in trajectory_lines(run) for turn in t["turns"]]
        assert all(len(set(turn["policy_versions"])) == 1 for turn in turns)
        assert {turn["policy_versions"][0] for turn in turns} >= {0, 1, 3}
        assert_ledger_adds_up(run)
        assert (run / "final" / "adapter_model.safetensors").is_file()
