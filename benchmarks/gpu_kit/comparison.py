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

    (setting.folder / "beside_trl_env.py").write_text(job.ENVIRONMENT)
    model = job.make_model(setting.folder, job.PUBLISHED, steps=8 if setting.tiny else 400)
    steps = job.SKIPPED + (1 if setting.tiny else 4)
    for side, level in (("synchronous", 0), ("asynchronous", 1)):
        out.figures[side] = _rounded(job.ours(setting.folder, model, steps, level))
    out.figures["trl"] = _rounded(job.theirs(setting.folder, Path(sys.executable), model, steps, setting.device))
    best = max(out.figures[side]["rate"] for side in ("synchronous", "asynchronous"))
    out.figures["times_as_fast"] = round(best / out.figures["trl"]["rate"], 2)


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
    assert ended == [0, 0], f"the ranks ended with {ended}: {_last_words(place)}"
    samples = shared_prefixes(setting)
    for packing in ("rows", "tree"):
        alone = gradient_of(folder, setting.device, samples, packing=packing)
        found = load_file(place / f"{packing}.safetensors")
        out.at_most(f"{packing} float32", largest_error(found, alone), 2 * bound_of(setting, torch.float32))


def _last_words(place: Path) -> str:
    return " | ".join(path.read_text(errors="replace")[-1000:] for path in sorted(place.glob("log-*")))


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
