"""A run with low-rank adapters through a real vLLM server, killed and resumed: `make test-vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.test_vllm_runs import LONGEST, RUN, model, servers, start
from e2e.tiny_runs import LOTS, assert_ledger_adds_up, steps_so_far, train_lines, trajectory_lines, workplace
from inference.vllm.real_servers import ONE_PROCESS
from waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.realtime, pytest.mark.filterwarnings("ignore::FutureWarning")]
__all__ = ["model"]
((FLAG, OFF),) = ONE_PROCESS.items()
LORA = (
    RUN.replace("[trainer.optim]", "[trainer.lora]\nr = 8\nalpha = 4\n[trainer.optim]")
    .replace("lr = 1e-3", "lr = 1e-2")
    .replace("interval = 5", "interval = 1")
    .replace("env = {{ ", f'env = {{{{ {FLAG} = "{OFF}", ')
)


def test_a_run_with_adapters_is_sampled_by_vllm_leaves_no_server_when_it_is_killed_and_is_resumed(
    tmp_path: Path, model: Path
):
    with workplace(tmp_path, {"lots": LOTS}) as place:
        with start(place, model, steps=1000, replicas=1, text=LORA) as run:
            wait_until(lambda: len(steps_so_far(place / "mine")) >= 3 or run.poll() is not None, LONGEST)
            assert servers(place)
            run.kill()
        wait_until(lambda: servers(place) == [])
        done = len(steps_so_far(place / "mine"))
        saved = max(int(path.name[5:]) for path in (place / "mine" / "checkpoints").glob("step_*"))
        assert saved in (done - 1, done)
        with start(place, model, "--resume", "--max-steps", str(done + 2), steps=1000, replicas=1, text=LORA) as run:
            assert run.wait(LONGEST) == 0
        steps = train_lines(place / "mine")
        assert [line["step"] for line in steps] == list(range(1, done + 3))
        assert all(line["metrics"]["grad_norm"] > 0 for line in steps)
        for at in (0, saved):  # sampled by the weights that are trained: the first ones, and those of the checkpoint
            assert steps[at]["metrics"]["mismatch_kl"] < 1e-8
        turns = [turn for t in trajectory_lines(place / "mine") for turn in t["turns"]]
        assert all(len(set(turn["policy_versions"])) == 1 for turn in turns)
        assert {turn["policy_versions"][0] for turn in turns} >= {0, saved}
        assert_ledger_adds_up(place / "mine")
        assert (place / "mine" / "final" / "adapter_model.safetensors").is_file()
        assert servers(place) == []
