"""Lists the devices that a plan knows: memory, rate of computing, and how fast memory and links are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, by its maker's figures."""

    name: str
    """What it is called here."""
    memory: int
    """Bytes that programs see."""
    flops: Mapping[str, float]
    """Operations per second of matrix products by number format, without sparsity."""
    bandwidth: float
    """Bytes per second from and to its memory."""
    link: float
    """Bytes per second to another device of the same machine, in one direction."""
    is_cuda: bool = True
    """Whether it is a CUDA device."""


def _gpu(name: str, gib: float, bfloat16: float, float32: float, bandwidth: float, link: float) -> Device:
    """Teraflops, terabytes per second of memory, gigabytes per second of a link."""
    return Device(
        name=name,
        memory=int(gib * GIB),
        flops={"bfloat16": bfloat16 * 1e12, "float32": float32 * 1e12},
        bandwidth=bandwidth * 1e12,
        link=link * 1e9,
    )


GPUS: Mapping[str, Device] = {
    gpu.name: gpu
    for gpu in (
        _gpu("4090", 23.5, 165, 82.6, 1.008, 32),
        _gpu("a100-40", 39.4, 312, 19.5, 1.555, 300),
        _gpu("a100-80", 79.2, 312, 19.5, 2.039, 300),
        _gpu("b200", 178, 2250, 75, 7.7, 900),
        _gpu("h100", 79.1, 989, 67, 3.35, 450),
        _gpu("h200", 139.8, 989, 67, 4.8, 450),
        _gpu("l40s", 44.4, 362, 91.6, 0.864, 32),
    )
}
"""The SXM form of those that have one. float32 without TF32, which torch does not use by default. A link is NVLink
where there is one, else PCIe 4."""
CPU = "cpu"
NAMES = (*GPUS, CPU)
"""What `--gpu` takes."""


def find_device(name: str) -> Device:
    """The device of this name; "cpu" is measured, which takes a moment.

    Raises:
        UsageError: an unknown name.
    """
    if name.lower() == CPU:
        return this_cpu()
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    raise UsageError(
        f"--gpu {name}: this device is not known; expected one of {', '.join(NAMES)}. The nearest one "
        "with no more memory gives a plan that is on the safe side"
    )


def device_here(is_cuda: bool) -> Device:
    """The first CUDA device of this machine, or its CPU.

    Raises:
        UsageError: a CUDA device that the table does not have.
    """
    if not is_cuda:
        return this_cpu()
    import torch

    found = torch.cuda.get_device_properties(0)
    total = found.total_memory / GIB
    fitting = [
        gpu
        for gpu in GPUS.values()
        if gpu.name.partition("-")[0] in found.name.lower() and abs(gpu.memory / GIB - total) < 4
    ]
    if not fitting:
        raise UsageError(
            f"this machine has a {found.name}, which is not in the table; name one that is like it: --gpu "
            f"{', '.join(GPUS)}"
        )
    return fitting[0]


def this_cpu() -> Device:
    """This machine: its memory, and rates of one large product and one large copy, measured by the processor's clock,
    which stands still while others have it."""
    import torch

    a = torch.ones(1024, 1024, device="cpu")
    num_threads = torch.get_num_threads()
    product = _fastest(lambda: a @ a, num_threads)
    block = torch.ones(1 << 24, device="cpu")
    copy = _fastest(block.clone, num_threads)
    rate = 2 * 1024**3 / product
    flops = {"float32": rate, "bfloat16": rate * _gain()}
    return Device(
        name=CPU,
        memory=_host_memory(),
        flops=flops,
        bandwidth=2 * block.nbytes / copy,
        link=block.nbytes / copy,
        is_cuda=False,
    )


def _gain() -> float:
    """How many times as fast products in bfloat16 are as those in float32; 1 where the processor has none of them."""
    import torch

    from verbatim.models.instructions import has_bfloat16
    from verbatim.trainer.linear import product

    if not has_bfloat16():
        return 1.0
    a = torch.ones(1024, 1024, device="cpu")
    b = a.bfloat16()
    num_threads = torch.get_num_threads()
    return _fastest(lambda: product(a, a), num_threads) / _fastest(lambda: product(b, b), num_threads)


def _fastest(do: Callable[[], object], num_threads: int) -> float:
    """Seconds of the fastest of a few calls, where all threads have a core."""
    seconds = []
    for _ in range(4):
        began = time.process_time()
        do()
        seconds.append(time.process_time() - began)
    return min(seconds) / num_threads


def _host_memory() -> int:
    """Bytes of this machine, or of the control group that this process may use."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # none, or "max"
            continue
    return total
