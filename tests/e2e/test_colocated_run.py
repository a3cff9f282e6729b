"""Whole runs on one device: `verbatim rl` starts a double of vLLM as its server, which forgets its weights when it
sleeps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.tiny_runs import FILTERS, LOTS, build_tiny_model, steps_so_far, workplace
from inference.vllm.double_server import fake_python
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]
LONGEST = 3600
"""Seconds until a run counts as hung."""

RUN = f"""
max_steps = 4
[model]
name = "{{model}}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 384
max_async_level = 0
sampling = {{{{ max_tokens = 4 }}}}
[orchestrator.eval]
interval = 2
episodes = 4
[trainer]
device = "cpu"
[trainer.optim]
lr = 1e-2
[checkpoint]
interval = 1
[inference]
backend = "vllm"
[inference.vllm]
python = "{{python}}"
colocate = true
{FILTERS}[[orchestrator.train.env]]
import_path = "lots.Lots"
[[orchestrator.eval.env]]
import_path = "lots.Lots"
"""


@pytest.fixture
def place(tmp_path: Path):
    with workplace(tmp_path / "work", {"lots": LOTS}) as folder:
        model = build_tiny_model(tmp_path / "model")
        (folder / "run.toml").write_text(RUN.format(model=model, python=fake_python(tmp_path, warm=True)))
        yield folder


@contextlib.contextmanager
def start(place: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run, which does not outlive a test that fails."""
    with subprocess.Popen(
        [sys.executable, "-m", "verbatim.cli", "rl", *arguments],
        cwd=place,
        env={**os.environ, "DOUBLE_SLEEPS": "1", "PYTHONPATH": os.pathsep.join([str(place), *sys.path])},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def log(place: Path) -> str:
    """The routes that servers were asked for."""
    return (place / "mine" / "logs" / "inference" / "replica_0.log").read_text()


def turns(text: str) -> list[list[str]]:
    """The routes that a server was asked for, from each sleep to the next; the first ones before any sleep."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("/sleep"):
            found.append([])
        elif line.startswith("/") and line not in ("/health", "/metrics"):
            found[-1].append(line.partition("?reset")[0].partition("?mode")[0])
    return found


UPDATE = [
    "/pause",
    "/wake_up?tags=weights",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/update_weight_version",
    "/weight_info",
    "/reset_prefix_cache",
    "/wake_up?tags=kv_cache",
    "/resume",
]


def is_served(place: Path) -> bool:
    """Whether a server is left, which writes to the log."""
    path = str((place / "mine" / "logs" / "inference" / "replica_0.log").resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "fd" / "1") == path:
                return True
    return False


def test_sampler_and_trainer_take_turns_until_the_end_also_in_a_run_that_was_killed_and_goes_on(place):
    with start(place, "run.toml", "--run-dir", "mine", "--max-steps", "1000") as run:
        wait_until(lambda: len(steps_so_far(place / "mine")) >= 3 or run.poll() is not None, LONGEST)
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_served(place), LONGEST)  # the server may still write what it was asked last
    done, first = len(steps_so_far(place / "mine")), log(place)
    (place / "mine" / "config.toml").write_text(
        (place / "mine" / "config.toml").read_text().replace("max_steps = 1000", f"max_steps = {done + 2}")
    )
    with start(place, "mine/config.toml", "--resume", "mine") as run:
        assert run.wait(LONGEST) == 0
    found = steps_so_far(place / "mine")
    assert [line["step"] for line in found] == list(range(1, done + 3)) and done >= 3
    for line in found:
        metrics = line["metrics"]
        assert metrics["time/sampler_asleep"] > 0 and metrics["replica/0/waking_seconds"] > 0
        assert metrics["replica/0/policy_version"] == line["step"]
        assert metrics["replicas/failed_checks"] == metrics["replicas/lost"] == metrics["time/trainer_moving"] == 0
        assert metrics["mismatch_kl"] < 1e-8 and metrics["staleness/max"] == 0
    last = found[-1]["metrics"]
    dropped = sum(value for name, value in last.items() if name.startswith("ledger/dropped/"))
    assert last["ledger/sampled"] == last["ledger/trained"] + last["ledger/masked_by_loss"] + dropped
    for text, num_turns in ((first, done), (log(place)[len(first) :], len(found) - done)):
        before, *asleep = turns(text)
        assert "/inference/v1/generate" in before and len(asleep) >= num_turns
        for routes in asleep[:num_turns]:
            assert routes[: len(UPDATE)] == UPDATE
            assert set(routes[len(UPDATE) :]) <= {"/inference/v1/generate"}
