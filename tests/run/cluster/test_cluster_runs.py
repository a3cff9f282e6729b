"""Whole runs on a cluster of several nodes, some of which are lost: bit for bit the run of one machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import warm
from campaigns import sized
from e2e.tiny_runs import LOTS, build_tiny_model, train_lines
from run.cluster.cluster_program import RANK, REPLICA, WORKER, tables
from waiting import HANGS

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.realtime]

INTERVAL = 3
"""Steps between two checkpoints."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model and an environment."""
    made = tmp_path_factory.mktemp("cluster")
    build_tiny_model(made / "model")
    (made / "lots.py").write_text(LOTS)
    return made


def settings_of(folder: Path, steps: int, *, lora: bool) -> dict[str, Any]:
    """The tables of a run that trains all weights, or adapters."""
    settings = tables(folder, steps)
    if lora:
        settings["trainer"]["lora"] = {"r": 4}
    return settings


def here(folder: Path, steps: int, *, lora: bool = False) -> Path:
    """The same run on one machine, with two ranks."""
    run = folder / f"here-{steps}-{'adapters' if lora else 'weights'}"
    if not run.exists():
        settings = {**settings_of(folder, steps, lora=lora), "run_dir": str(run)}
        program = "import json, sys, verbatim; verbatim.run(json.load(sys.stdin), quiet=True)"
        warm.run(
            [sys.executable, "-c", program],
            input=json.dumps(settings),
            cwd=folder,
            env=environment(folder),
            text=True,
            check=True,
            timeout=HANGS,
        )
    return run


def on_cluster(folder: Path, **plan: Any) -> dict[str, Any]:
    """What the program printed at the end of a run on a cluster."""
    done = warm.run(
        [sys.executable, "-m", "run.cluster.cluster_program", str(folder)],
        input=json.dumps(plan),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=4 * HANGS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"struck"')]
    said = [
        line for line in f"{done.stdout}\n{done.stderr}".splitlines() if "raylet" not in line and "[state-" not in line
    ]
    assert done.returncode == 0 and lines, "\n".join(said[-60:])
    return json.loads(lines[-1])


def environment(folder: Path) -> dict[str, str]:
    tests = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": f"{tests}:{folder}", "RAY_DEDUP_LOGS": "0"}


def weights(run: Path) -> dict[str, str]:
    """The digests of the weights that a run has trained, by file."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (run / "final").glob("*.safetensors")}
    assert found
    return found


def differences(run: Path, expected: Path, steps: int) -> list[str]:
    """What a run that lost parts of the cluster has otherwise than one that lost nothing."""
    found, lines = [], train_lines(run)
    if weights(run) != weights(expected):
        found.append("other weights")
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        found.append(f"steps {[line['step'] for line in lines]}")
    for mine, theirs in zip(lines, train_lines(expected), strict=False):
        if mine["metrics"]["ledger/trained"] != theirs["metrics"]["ledger/trained"]:
            found.append(f"step {mine['step']}: other tokens in the ledger")
        if mine["metrics"]["trainer/replayed_batches"] > INTERVAL * 5:
            found.append(f"step {mine['step']}: {mine['metrics']['trainer/replayed_batches']} batches trained again")
    return found


def test_a_run_that_loses_a_rank_a_replica_a_worker_and_a_node_is_that_of_one_machine(folder):
    """Two ranks, two embedded replicas and four workers on three nodes, without a folder that they share."""
    kills = {"1": [RANK], "2": [REPLICA], "3": [WORKER], "5": ["node"]}
    found = on_cluster(folder, name="struck", steps=6, kills=kills)
    assert found["struck"] == [RANK, REPLICA, WORKER, "node"]
    assert differences(folder / "struck", here(folder, 6), 6) == []
    metrics = [line["metrics"] for line in train_lines(folder / "struck")]
    assert metrics[-1]["trainer/restarts"] >= 1
    assert sorted(path.name for path in (folder / "struck" / "checkpoints").glob("step_*")) == [
        "step_000003",
        "step_000006",
    ]


@pytest.mark.campaign
def test_runs_that_lose_parts_at_random_moments(folder, campaign):
    """Ranks, replicas, workers and nodes are killed at random moments; of the whole, thirty of them on eight nodes. The
    first run and each second one after it train adapters."""
    row, wrong, steps = campaign("kills on a cluster"), [], sized(6, 60)
    for seed in range(sized(1, 5)):
        kills, lora = sized(2, 6), seed % 2 == 0
        plan = {"name": f"random-{seed}", "steps": steps, "nodes": sized(3, 8), "random_kills": kills, "seed": seed}
        plan["settings"] = {"trainer": settings_of(folder, steps, lora=lora)["trainer"]}
        found = on_cluster(folder, **plan)
        row.cases += len(found["struck"])
        different = differences(folder / plan["name"], here(folder, steps, lora=lora), steps)
        row.wrong += bool(different)
        if different or len(found["struck"]) != kills:
            wrong.append(f"seed {seed}, {found['struck']}: {'; '.join(different)}")
    assert wrong == []
