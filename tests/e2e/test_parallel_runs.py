"""Runs whose trainer is several processes: from warm start to final model, a rank that dies, resumed on fewer."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from e2e.tiny_runs import LOTS, TOML, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from verbatim.cli.main import main
from verbatim.config import load_config
from verbatim.core.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

FATAL = '''
import json
import os
import re
from pathlib import Path

from lots import Lots


class Fatal(Lots):
    """At the start of the given episode, sends a signal to rank 1 of the trainer; then the plan is done with."""

    started = 0

    async def start(self, example, seed):
        self.started += 1
        plan = Path("outcome.json")
        if plan.exists() and json.loads(plan.read_text())["episode"] == self.started:
            outcome = json.loads(plan.read_text())
            plan.unlink()
            log = (Path(outcome["run"]) / "logs" / "trainer-rank-1.log").read_text()
            os.kill(int(re.findall(r"started \\(process (\\d+)\\)", log)[-1]), outcome["signal"])
        return await super().start(example, seed)
'''

GUESS = """\
max_steps = 2
[model.build]
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 64
vocab_size = 512
[warm_start]
steps = 4
batch_size = 8
conversations = 32
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 512
max_async_level = 0
sampling = { max_tokens = 24 }
filters = []
[[orchestrator.train.env]]
id = "guess_number"
max_turns = 3
[trainer]
packing = "tree"
parallel = { processes = 2 }
[trainer.optim]
lr = 1e-3
[inference.torch]
max_batch_size = 8
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("parallel")
    text = TOML.format(model=build_tiny_model(root / "model"))
    text = text.replace("separate_process = false\n", "parallel = { processes = 2 }\n")
    text = text.replace("max_steps = 2", "max_steps = 4")
    (root / "run.toml").write_text(text + 'import_path = "fatal.Fatal"\n[checkpoint]\ninterval = 1\n')
    (root / "guess.toml").write_text(GUESS)
    with workplace(root, {"lots": LOTS, "fatal": FATAL}):
        yield root


def verbatim(*arguments: str) -> tuple[int, str]:
    """A command's status and all that it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(arguments)
    return status, out.getvalue()


def ranks_that_live(run: Path) -> list[int]:
    """Processes of other ranks that are left of this run."""
    pids = re.findall(r"started \(process (\d+)\)", (run / "logs" / "trainer-rank-1.log").read_text())
    return [pid for pid in map(int, pids) if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it may go while it is read
        return False
    return b"trainer_rank" in command


@pytest.mark.parametrize("sequence", [1, 2])
def test_guess_number_is_warm_started_and_trained_by_two_processes(place, sequence):
    """Each with micro-batches of its own, or with half of the tokens of all."""
    name = f"guess-{sequence}"
    status, said = verbatim("rl", "guess.toml", "--run-dir", name, "--trainer.parallel.sequence", str(sequence))
    assert status == 3 and "the advantage of every one was 0" in said, said  # so small a model wins no game
    run = place / name
    assert (run / "warm_start" / "model.safetensors").exists()
    steps = train_lines(run)
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["metrics"]["trained_tokens"] > 0 for line in steps)
    assert_ledger_adds_up(run)
    names = {path.name for path in (run / "checkpoints" / "step_000002" / "trainer").iterdir()}
    assert "optimizer-00002-of-00002.safetensors" in names
    assert not ranks_that_live(run)


def test_a_killed_rank_is_named_and_the_run_resumes_on_one_process_and_on_two(place):
    (place / "outcome.json").write_text('{"run": "killed", "episode": 20, "signal": 9}')  # in the third batch
    status, said = verbatim("rl", "run.toml", "--run-dir", "killed")
    assert status == 1
    said = " ".join(said.split())
    assert re.search(r"rank 1 of the trainer \(process \d+ on \S+\) was ended by SIGKILL", said), said
    run = place / "killed"
    assert not ranks_that_live(run)
    kept = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    assert kept >= 1
    again = ("--max-steps", str(kept + 1))
    status, said = verbatim("rl", "run.toml", "--resume", "killed", "--trainer.parallel.processes", "1", *again)
    assert status == 0, said
    status, said = verbatim("rl", "run.toml", "--resume", "killed", "--max-steps", str(kept + 2))
    assert status == 0, said
    steps = train_lines(run)
    assert [line["step"] for line in steps] == list(range(1, kept + 3))
    assert_ledger_adds_up(run)


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_launcher_starts_the_processes_of_a_supervised_run_too(place, sequence):
    """`torchrun ... verbatim sft`: rank 0 has the run's folder, the others follow."""
    name = f"sft-{sequence}"
    (place / f"{name}.toml").write_text(GUESS.replace("parallel = { processes = 2 }\n", ""))
    done = warm.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "verbatim.cli",
            "sft",
            f"{name}.toml",
            "--trainer.parallel.sequence",
            str(sequence),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained model") == 1
    (run,) = (place / "runs").glob(f"{name}-sft/2*")
    assert (run / "warm_start" / "model.safetensors").exists()


def test_processes_without_a_process_of_the_trainers_own_are_refused(place):
    with pytest.raises(ConfigError, match=r"parallel\.processes = 2 needs separate_process = true"):
        load_config(Path("run.toml"), ["--trainer.separate-process", "false"])
