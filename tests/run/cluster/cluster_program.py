"""A program of its own, because one process has one Ray: a run on a cluster of several nodes, some of which are lost.

`python -m run.cluster.cluster_program FOLDER` works in a folder with `model` and `lots.py`, reads a `Plan` as JSON from
stdin, and prints one JSON line: what was killed, and what is left of the run's processes. The run is in FOLDER/NAME.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # read when Ray is imported; a busy machine needs it

import verbatim
from ray_workers import warm_workers
from waiting import wait_until

RANK, REPLICA, WORKER = "RankActor", "ReplicaActor", "EpisodeActor"
PARTS = (RANK, REPLICA, WORKER)
QUIET = {"object_store_memory": 100 * 2**20, "include_dashboard": False}


@dataclass(kw_only=True)
class Plan:
    """What happens."""

    name: str
    nodes: int = 3
    steps: int = 4
    kills: dict[int, list[str]] = field(default_factory=dict)
    """By step: what is killed once this step is logged: a part, or "node"."""
    random_kills: int = 0
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Tables that replace those below."""


def tables(folder: Path, steps: int) -> dict[str, Any]:
    """A run with two ranks that is the same, bit for bit, wherever it runs."""
    return {
        "max_steps": steps,
        "seed": 1,
        "model": {"name": str(folder / "model")},
        "orchestrator": {
            "train": {"env": [{"import_path": "lots.Lots"}]},
            "batch_size": 8,
            "group_size": 4,
            "seq_len": 64,
            "max_async_level": 0,
            "sampling": {"max_tokens": 6},
            "filters": [{"type": "zero_advantage"}],
        },
        "trainer": {"parallel": {"processes": 2}, "num_threads": 1, "optim": {"lr": 1e-3}},
        "inference": {"torch": {"deterministic": True, "num_threads": 1, "kernel": "torch"}},
        "checkpoint": {"interval": 3},
    }


class World:
    """A cluster, and a way to strike it."""

    def __init__(self, plan: Plan) -> None:
        from ray.cluster_utils import Cluster

        self.plan, self.struck = plan, []
        self.random, self.begun = random.Random(plan.seed), threading.Event()
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **QUIET})
        self.nodes = [self.cluster.add_node(num_cpus=5, **QUIET) for _ in range(plan.nodes)]

    def strike(self, what: str) -> None:
        """Kill a process of this part with SIGKILL, or a node with everything on it, unless only two are left."""
        if what == "node" and len(self.nodes) > 2:
            lost = self.nodes.pop(self.random.randrange(len(self.nodes)))
            self.struck.append(what)
            self.cluster.remove_node(lost, allow_graceful=False)
        elif found := processes_of(what):
            os.kill(self.random.choice(found), signal.SIGKILL)
            self.struck.append(what)


class Striker:
    """A monitor that strikes when steps are logged."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_step(self, step: int, metrics: dict[str, float], distributions: Any) -> None:
        self.world.begun.set()
        if step == self.world.plan.steps - 1:  # the run does not end before it was struck as often as it should be
            wait_until(lambda: len(self.world.struck) >= self.world.plan.random_kills)
        for what in self.world.plan.kills.get(step, []):
            self.world.strike(what)


def processes_of(*parts: str) -> list[int]:
    """The ids of the actors' processes that this program's cluster started."""
    return [pid for pid, command in marked() if any(command.startswith(f"ray::{part}") for part in parts)]


def servers() -> list[int]:
    """The ids of vLLM's processes and their subreapers."""
    return [pid for pid, command in marked() if "vllm" in command]


def marked() -> list[tuple[int, str]]:
    """Id and command line of every process that this program started, directly or not."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == FORKS_WORKERS or MARK.encode() in (process / "environ").read_bytes():
                found.append((int(process.name), (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return sorted(found)


MARK = f"VERBATIM_TEST_MARK={os.getpid()}"
FORKS_WORKERS = 0
"""The parent of Ray's workers (ray_workers.py)."""


def main() -> None:
    global FORKS_WORKERS
    folder, plan = Path(sys.argv[1]).resolve(), Plan(**json.loads(sys.stdin.read()))
    plan.kills = {int(step): what for step, what in plan.kills.items()}
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with warm_workers() as FORKS_WORKERS:
        run(folder, plan)


def run(folder: Path, plan: Plan) -> None:
    """Print the line."""
    import ray

    world = World(plan)
    over = threading.Event()

    def strike_at_random() -> None:
        world.begun.wait()  # a server that does not start ends a run, as on one machine
        while len(world.struck) < plan.random_kills and not over.wait(world.random.uniform(0.1, 1.5)):
            world.strike(world.random.choice([*PARTS, "node"]))

    striking = threading.Thread(target=strike_at_random, daemon=True)
    try:
        if plan.random_kills:
            striking.start()
        cluster = {"address": world.cluster.address, "replicas": 2, "max_trainer_restarts": 100}
        settings = tables(folder, plan.steps)
        settings["orchestrator"]["rollout"] = {"backend": "ray", "workers": max(4, plan.nodes)}
        settings |= {"cluster": cluster, "run_dir": str(folder / plan.name), **plan.settings}
        began = time.monotonic()
        result = verbatim.run(settings, monitors=[Striker(world)], quiet=True)
        seconds = time.monotonic() - began
        over.set()
        wait_until(lambda: not processes_of(*PARTS) and not servers())
        done = {"struck": world.struck, "left": servers(), "summary": result.summary, "seconds": seconds}
        print(json.dumps(done, default=str))
    finally:
        over.set()
        world.begun.set()
        ray.shutdown()
        world.cluster.shutdown()


if __name__ == "__main__":
    main()
