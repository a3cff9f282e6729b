"""Whole runs whose trainer, two processes, broadcasts its weights to two servers: doubles of vLLM's, over gloo."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.tiny_runs import FILTERS, LOTS, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from inference.vllm.double_server import fake_python

pytestmark = pytest.mark.slow

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
keep_last = 20
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
        (folder / "run.toml").write_text(RUN.format(model=model, python=fake_python(tmp_path), timeout=60))
        (folder / "received").mkdir()
        yield folder


def start(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (place / "out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "verbatim.cli", "rl", *arguments], cwd=place, stdout=out, stderr=out,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path]), "OMP_NUM_THREADS": "1",
                 "DOUBLE_RECEIVED": str(place / "received"), "DOUBLE_STRIKE": str(place / "strike")},
        )  # fmt: skip


def wait_for_steps(place: Path, count: int, run: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not (place / "mine" / "metrics.jsonl").exists() or len(train_lines(place / "mine")) < count:
        assert run.poll() is None and time.monotonic() < until, said(place)
        time.sleep(0.02)


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


def test_every_version_reaches_both_servers_bit_for_bit(place):
    with start(place, "run.toml", "--run-dir", "mine") as run:
        assert run.wait(400) == 0, said(place)
    versions, arrived = published(place), received(place)
    assert sorted(versions) == list(range(7)) and sorted(arrived) == list(range(7))
    for version, tensors in arrived.items():
        assert tensors == [versions[version]] * 2
    assert len({json.dumps(tensors) for tensors in versions.values()}) == 7
    for line in train_lines(place / "mine"):
        metrics = line["metrics"]
        assert metrics["weights/broadcast"] == 1 and 0 < metrics["time/weight_broadcast"] < metrics["time/weight_sync"]
        assert metrics["replica/0/policy_version"] == metrics["replica/1/policy_version"] == line["step"]
        assert metrics["replicas/failed_checks"] == metrics["replicas/lost"] == 0
    assert_ledger_adds_up(place / "mine")
    logs = (place / "mine" / "logs" / "inference" / "replica_0.log").read_text()
    assert logs.count("/update_weights") == 7  # no folder was read beside
