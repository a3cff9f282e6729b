"""Measures the resident memory of real training steps, each process of the trainer in a process of its own.

What is counted: the highest resident memory of the second of two steps, above that of the same process with everything
imported, a tiny model trained and dropped, and the processes connected. The first step, which may be of a few samples,
makes the optimizer's state. glibc gives each large tensor its own mapping (MALLOC_MMAP_THRESHOLD_, from the first
allocation on), so that freed memory goes back at once: with its default it keeps freed pieces of up to 32 MB for later,
between which others are still in use.

The processes are forked from one that has imported everything, `python real_step.py`: a job a line on standard input,
the bytes of its processes as a line on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THRESHOLD = str(1 << 16)
"""Bytes from which a tensor has a mapping of its own."""


def resident(key):
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


@contextlib.contextmanager
def measuring(first: int | None = None) -> Iterator[Callable[..., list[int]]]:
    """Yield `peaks`, which measures in forks of one process.

    Args:
        first: Number of samples per process in the first step; None for all.
    """
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, sys.path)]),
        "MALLOC_MMAP_THRESHOLD_": THRESHOLD,
        "MALLOC_TRIM_THRESHOLD_": THRESHOLD,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as server,
    ):

        def peaks(
            folder: Path,
            settings: dict[str, Any],
            lengths: dict[str, int],
            *,
            processes: int = 1,
            loss: str = "default",
            reference: str | None = None,
            experts: int = 0,
        ) -> list[int]:
            """Bytes of each process, in the order of ranks.

            Args:
                folder: The model.
                settings: Keys of `[trainer]`.
                lengths: Arguments of `plan_helpers.groups`.
                processes: Number of processes.
                loss: A name of `LOSSES`.
                reference: A model that is not trained.
                experts: Number of experts per layer of the model; 0 for a dense model.
            """
            assert server.stdin is not None and server.stdout is not None
            with tempfile.TemporaryDirectory() as name:
                job = {
                    "folder": str(folder),
                    "settings": settings,
                    "lengths": lengths,
                    "processes": processes,
                    "loss": loss,
                    "reference": reference,
                    "experts": experts,
                    "first": None if first is None else first * processes,
                    "meet": str(Path(name) / "store"),
                }
                print(json.dumps(job), file=server.stdin, flush=True)
                found = [int(each) for each in server.stdout.readline().split()]
            errors.seek(0)
            assert len(found) == processes, errors.read()[-3000:]
            return found

        yield peaks


def serve():
    """Measure the jobs on standard input, until it ends."""
    import plan_helpers  # noqa: F401
    import torch.distributed  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import verbatim.trainer.trainer  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job, children = json.loads(line), []
        for rank in range(job["processes"]):
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                os.dup2(into, 1)
                try:
                    run(job, rank)
                except BaseException:  # noqa: BLE001  (who asked shows it)
                    traceback.print_exc()
                os._exit(0)
            os.close(into)
            children.append((child, out))
        said = []
        for child, out in children:
            with open(out) as stream:
                said.append(stream.read().split()[-1:])
            os.waitpid(child, 0)
        print(*(each for (each,) in filter(None, said)), flush=True)


def run(job, rank):
    """Print the bytes of one process."""
    import torch
    import torch.distributed as dist
    from plan_helpers import groups, write_model

    from verbatim.algorithms.losses import LOSSES
    from verbatim.config.schema import TrainerConfig
    from verbatim.trainer.parallel.ranks import Ranks
    from verbatim.trainer.trainer import Trainer

    torch.set_num_threads(1)
    samples = groups(**job["lengths"])
    with tempfile.TemporaryDirectory() as name:
        tiny = write_model(
            Path(name), hidden_size=64, layers=2, vocab_size=job["lengths"]["vocab_size"], experts=job["experts"]
        )
        plain = {k: v for k, v in job["settings"].items() if k != "parallel"}
        tiny_trainer = Trainer(
            tiny,
            TrainerConfig(device="cpu", **plain),
            loss=LOSSES[job["loss"]],
            total_optimizer_steps=9,
            frozen={"reference": tiny} if job["reference"] else None,
        )
        tiny_trainer.train_batch(samples[:2])
        del tiny_trainer
    ranks = None
    if job["processes"] > 1:
        store = dist.FileStore(job["meet"], job["processes"])
        ranks = Ranks(store, rank=rank, size=job["processes"], deadline=600)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    trainer = Trainer(
        job["folder"],
        TrainerConfig(device="cpu", **job["settings"]),
        loss=LOSSES[job["loss"]],
        total_optimizer_steps=9,
        ranks=ranks,
        frozen={"reference": job["reference"]} if job["reference"] else None,
    )
    steps = 0

    def reset_before_the_second():
        nonlocal steps
        steps += 1
        if steps == 2:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here

    if rank:

        def obey(order):
            if order["do"] == "train":
                reset_before_the_second()
            trainer.obey(order)

        ranks.follow(obey)
    else:
        for batch in (samples[: job["first"]], samples):
            reset_before_the_second()
            trainer.train_batch(batch)
        if ranks is not None:
            ranks.end()
    print(resident("VmHWM") - before)
    sys.stdout.flush()
    if ranks is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve()
