"""Measures the resident memory of real training steps, each process of the trainer in a process of its own.

What is counted: the highest resident memory of the second of two steps, above that of the same process with everything
imported, a tiny model trained and dropped, and the processes connected. glibc gives each large tensor its own mapping
(MALLOC_MMAP_THRESHOLD_), so that freed memory goes back at once: with its default it keeps freed pieces of up to 32 MB
for later, between which others are still in use.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

THRESHOLD = str(1 << 16)
"""Bytes from which a tensor has a mapping of its own."""


def resident(key):
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def peaks(folder, settings, lengths, *, processes=1, loss="default", reference=None, experts=0, own_malloc=True):
    """Bytes of each process, in the order of ranks.

    Args:
        folder: The model.
        settings: Keys of `[trainer]`.
        lengths: Arguments of `plan_helpers.groups`.
        processes: How many.
        loss: A name of `LOSSES`.
        reference: A model that is not trained.
        experts: How many each layer of the model has; 0 = it is dense.
        own_malloc: Whether large tensors have mappings of their own.
    """
    with tempfile.TemporaryDirectory() as name:
        job = {
            "folder": str(folder),
            "settings": settings,
            "lengths": lengths,
            "processes": processes,
            "loss": loss,
            "reference": reference,
            "experts": experts,
            "meet": str(Path(name) / "store"),
        }
        here = Path(__file__).parent
        malloc = {"MALLOC_MMAP_THRESHOLD_": THRESHOLD, "MALLOC_TRIM_THRESHOLD_": THRESHOLD} if own_malloc else {}
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here), *filter(None, sys.path)]),
            **malloc,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        children = [
            subprocess.Popen(
                [sys.executable, __file__, json.dumps(job), str(rank)],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(processes)
        ]
        found = []
        for child in children:
            out, error = child.communicate(timeout=1200)
            assert child.returncode == 0, error[-3000:]
            found.append(int(out.splitlines()[-1]))
        return found


def main(job, rank):
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
        warm = Trainer(
            tiny,
            TrainerConfig(device="cpu", **plain),
            loss=LOSSES[job["loss"]],
            total_optimizer_steps=9,
            frozen={"reference": tiny} if job["reference"] else None,
        )
        warm.train_batch(samples[:2])
        del warm
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
        for _ in range(2):
            reset_before_the_second()
            trainer.train_batch(samples)
        if ranks is not None:
            ranks.end()
    print(resident("VmHWM") - before)
    sys.stdout.flush()
    if ranks is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
