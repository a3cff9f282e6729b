"""Whole runs whose trainer, two processes, broadcasts its weights to two servers: doubles of vLLM's, over gloo."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.tiny_runs import FILTERS, LOTS, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from inference.vllm.double_server import fake_python
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]
LONGEST = 3600
"""Seconds until a run counts as hung."""

RUN = f"""
max_steps = 6
[model]
name = "{{model}}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 384
max_async_level = 1
sampling = {{{{ max_tokens = 4 }}}}
[trainer]
device = "cpu"
parallel = {{{{ processes = 2 }}}}
[trainer.optim]
lr = 1e-2
[checkpoint]
interval = 1
keep_last = 1000
[inference]
backend = "vllm"
[inference.vllm]
python = "{{python}}"
replicas = 2
weight_transfer = "gloo"
update_timeout = {{timeout}}
health_timeout = {{timeout}}
{FILTERS}[[orchestrator.train.env]]
import_path = "lots.Lots"
"""


@pytest.fixture
def place(tmp_path: Path):
    with workplace(tmp_path / "work", {"lots": LOTS}) as folder:
        model = build_tiny_model(tmp_path / "model")
        (folder / "run.toml").write_text(RUN.format(model=model, python=fake_python(tmp_path, warm=True), timeout=60))
        (folder / "received").mkdir()
        yield folder


@contextlib.contextmanager
def start(place: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run, which does not outlive a test that fails."""
    with (place / "out").open("ab") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "verbatim.cli", "rl", *arguments],
            cwd=place,
            stdout=out,
            stderr=out,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(place), *sys.path]),
                "OMP_NUM_THREADS": "1",
                "DOUBLE_RECEIVED": str(place / "received"),
                "DOUBLE_STRIKE": str(place / "strike"),
            },
        )
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def num_steps(place: Path) -> int:
    """Steps of a run that goes on; its last line may be half written."""
    path = place / "mine" / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def said(place: Path) -> str:
    return (place / "out").read_text()[-6000:]


def published(place: Path) -> dict[int, dict[str, str]]:
    """SHA-256 of the bytes of each tensor, in the checkpoint of each version."""
    found = {}
    for folder in (place / "mine" / "checkpoints").glob("step_*"):
        tensors = load_file(folder / "weights" / "model.safetensors")
        found[int(folder.name[5:])] = {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
    return found


def received(place: Path) -> dict[int, list[dict[str, str] | None]]:
    """What each server has received of each version; None = it has read the folder."""
    found: dict[int, list[dict[str, str] | None]] = {}
    for path in sorted((place / "received").glob("*.json")):
        found.setdefault(int(path.name[:3]), []).append(json.loads(path.read_text()))
    return found


def test_every_version_reaches_both_servers_also_after_one_was_killed_in_the_middle_and_in_a_resumed_run(place):
    """The fellow of the killed one reads the folder of that version, the trainer goes on, and the group is rebuilt
    without it, then with it."""
    with start(place, "run.toml", "--run-dir", "mine", "--max-steps", "1000") as run:
        wait_until(lambda: num_steps(place) >= 3 or run.poll() is not None, LONGEST)
        (place / "plan").write_text("die")
        (place / "plan").rename(place / "strike")
        wait_until(lambda: is_whole_again(place) or run.poll() is not None, LONGEST)
        assert run.poll() is None, said(place)
        run.send_signal(signal.SIGINT)
        assert run.wait(LONGEST) == 130, said(place)
    done, struck = len(train_lines(place / "mine")), struck_at(place)
    steps = {line["step"]: line["metrics"] for line in train_lines(place / "mine")}
    assert {step for step, metrics in steps.items() if not metrics["weights/broadcast"]} == {struck}
    assert "could not be broadcast, and is loaded from its folder" in " ".join((place / "out").read_text().split())
    assert steps[done]["replicas/lost"] == 1 and steps[done]["replicas/failed_checks"] == 0
    with start(place, "mine/config.toml", "--resume", "mine", "--max-steps", str(done + 2)) as run:
        assert run.wait(LONGEST) == 0, said(place)
    lines = train_lines(place / "mine")
    assert [line["step"] for line in lines] == list(range(1, done + 3))
    versions, arrived = published(place), received(place)
    assert sorted(versions) == sorted(arrived) == list(range(done + 3))
    assert len({json.dumps(tensors) for tensors in versions.values()}) == done + 3
    assert set(arrived[struck]) == {None}  # read by the fellow, and by the killed one if it is back already
    for version, tensors in arrived.items():  # a server that comes back reads a folder first
        assert all(found == versions[version] or (found is None and version >= struck) for found in tensors), version
    for version in (*range(struck), done + 1, done + 2):
        assert arrived[version] == [versions[version]] * 2
    assert arrived[done][2:] == [versions[done]] * 2  # the resumed run begins with it
    for line in lines:
        metrics = line["metrics"]
        if line["step"] != struck:
            assert 0 < metrics["time/weight_broadcast"] < metrics["time/weight_sync"]
        for i in range(2):
            assert not metrics[f"replica/{i}/serving"] or metrics[f"replica/{i}/policy_version"] == line["step"]
    assert_ledger_adds_up(place / "mine")


def struck_at(place: Path) -> int:
    """The version in whose broadcast a server was killed: the first one that a server read from its folder."""
    return min(version for version, found in received(place).items() if None in found)


def is_whole_again(place: Path) -> bool:
    """Whether both servers have received a version after one of them was killed, and one alone before."""
    found = received(place)
    lost = [version for version, tensors in found.items() if None in tensors]
    later = [tensors for version, tensors in found.items() if lost and version > lost[0]]
    return any(len(tensors) == 2 and None not in tensors for tensors in later)
