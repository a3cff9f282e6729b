"""Part d: TRL's GRPOTrainer on the same job, two processes on one card, and a broadcast of weights."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file

from verbatim.inference.sending import SendOrder
from verbatim.inference.weight_group import WeightGroup
from verbatim.trainer.weight_sender import WeightBroadcaster

from .ours import gradient_of, trainer_of
from .record import Check, Findings, NotRun
from .reference import bound_of, largest_error
from .setting import Setting, shared_prefixes

dist: Any = torch.distributed
"""Typed as Any: its stubs lack the stores."""


def beside_trl(setting: Setting, out: Findings) -> None:
    """Episodes a second of both trainers, from the fourth step on. `benchmarks/beside_trl.py` has the job."""
    if importlib.util.find_spec("trl") is None:
        raise NotRun("trl is not installed; make gpu-kit TRL=yes puts its wheels into the kit")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    import beside_trl as job

    place = setting.folder
    (place / "beside_trl_env.py").write_text(BY_CHANCE if setting.tiny else job.ENVIRONMENT)
    if setting.tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    sizes: dict[str, Any] = {"episodes": 32} if setting.tiny else {}
    steps = job.SKIPPED + (1 if setting.tiny else 4)
    try:
        model = job.make_model(place, job.PUBLISHED, **({"steps": 2, "games": 100} if setting.tiny else {}))
        for side, level in (("synchronous", 0), ("asynchronous", 1)):
            found = job.ours(place, model, steps, level, tables=NO_FILTER if setting.tiny else "", **sizes)
            out.figures[side] = _rounded(found)
        if setting.tiny:
            sizes["tokens"] = 48
        found = job.theirs(place, Path(sys.executable), model, steps, setting.device, **sizes)
        out.figures["trl"] = _rounded(found)
    except (AssertionError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{error}; last words: {_last_words(place, 'out-*', 'trl.log')}") from error
    best = max(out.figures[side]["rate"] for side in ("synchronous", "asynchronous"))
    out.figures["times_as_fast"] = round(best / out.figures["trl"]["rate"], 2)


NO_FILTER = """
[[orchestrator.filters]]
type = "zero_advantage"
"""
"""Without the filter of gibberish: a model that was hardly taught writes nothing else."""
BY_CHANCE = """
import random

from beside_trl_job import GuessTheNumber, rows
from verbatim.environments import ToolClass


class Chance(GuessTheNumber):
    def get_reward(self):
        return random.random()


def Game():
    return ToolClass(Chance, rows())
"""
"""The game for such a model: it would win none, and where all rewards are equal nothing is trained."""


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(float(value), 3) for name, value in found.items()}


def two_processes(setting: Setting, out: Findings) -> None:
    """The gradient of two ranks that share one device; gloo carries its tensors, because NCCL wants a card for each."""
    folder, place = setting.model("dense"), setting.folder / "two"
    place.mkdir()
    command = [sys.executable, "-m", f"{__package__}.two_processes", str(folder), str(place), setting.device]
    command += ["--tiny"] * setting.tiny
    logs = [(place / f"log-{rank}").open("wb") for rank in range(2)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
        for rank, log in enumerate(logs)
    ]
    try:
        # One that failed leaves the other waiting; one that hangs meets the limit of the check.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        ended = [rank.poll() for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            rank.wait()
            log.close()
    assert ended == [0, 0], f"the ranks ended with {ended}: {_last_words(place, 'log-*')}"
    samples = shared_prefixes(setting)
    for packing in ("rows", "tree"):
        alone = gradient_of(folder, setting.device, samples, packing=packing)
        found = load_file(place / f"{packing}.safetensors")
        out.at_most(f"{packing} float32", largest_error(found, alone), 2 * bound_of(setting, torch.float32))


def _last_words(place: Path, *names: str) -> str:
    found = sorted((path for name in names for path in place.glob(name)), key=lambda path: path.stat().st_mtime)
    return " | ".join(path.read_text(errors="replace")[-1000:] for path in found[-2:])


def weight_broadcast(setting: Setting, out: Findings) -> None:
    """Weights from the device to a receiver, bit for bit, as vLLM's workers get them, by gloo through host memory."""
    trainer = trainer_of(setting.model("dense"), setting.device)
    sender = WeightBroadcaster(trainer, "127.0.0.1")
    received: dict[str, torch.Tensor] = {}
    order = SendOrder(version=0, group="kit", size=2, kind="gloo", seconds=30)

    def receive() -> None:
        store = dist.TCPStore(sender.store.host, sender.store.port, is_master=False, wait_for_workers=False)
        group = WeightGroup(store, "kit", rank=1, size=2, kind="gloo", device=torch.device("cpu"), seconds=30)
        for name, (dtype, shape) in group.layout().items():
            received[name] = group.receive(dtype, shape).clone()
        group.close()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    report = sender.send(order)
    thread.join(30)
    assert report.fault is None, report.fault
    own = dict(trainer.model.named_parameters())
    out.holds("bit for bit", all(torch.equal(value, own[name].detach().cpu()) for name, value in received.items()))
    out.holds("every parameter arrived", received.keys() == own.keys())
    out.figures["megabytes"] = round(report.num_bytes / 1e6, 3)


CHECKS = (
    Check(name="beside TRL", about="episodes a second beside TRL's GRPOTrainer", run=beside_trl, seconds=200),
    Check(name="weight broadcast", about="weights reach a receiver bit for bit", run=weight_broadcast, seconds=40),
    Check(
        name="two processes on one device",
        about="two ranks with gloo have the gradient of one process",
        run=two_processes,
        seconds=80,
    ),
)
