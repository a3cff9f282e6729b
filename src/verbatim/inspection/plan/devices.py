"""Lists the devices for which a plan can be made, with their memory, compute rates and bandwidths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import UsageError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, with the figures of its manufacturer."""

    name: str
    """The name by which `--gpu` selects the device."""
    memory: int
    """Memory that is available to programs, in bytes."""
    flops: Mapping[str, float]
    """By number format, the peak number of operations per second in matrix products, without sparsity."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    link: float
    """Bandwidth to a different device of the same machine in bytes per second, in one direction."""
    is_cuda: bool = True
    """True for a CUDA device."""


def _gpu(name: str, gib: float, bfloat16: float, float32: float, bandwidth: float, link: float) -> Device:
    """Make a device from its memory in GiB, its compute rates in teraflops, its memory bandwidth in TB/s and its link
    bandwidth in GB/s."""
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
"""The known GPUs, in their SXM variant if there is one. The float32 rate is without TF32, because torch does not use
TF32 by default. The link is NVLink if the device has it, else PCIe 4."""
CPU = "cpu"
NAMES = (*GPUS, CPU)
"""The values that `--gpu` accepts."""


def find_device(name: str) -> Device:
    """Return the device with this name. The figures of "cpu" are measured, which takes a moment.

    Raises:
        UsageError: the name is unknown.
    """
    if name.lower() == CPU:
        return this_cpu()
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    raise UsageError(
        f"--gpu {name}: this device is unknown; expected one of {', '.join(NAMES)}. For a safe estimate, "
        "use the most similar device that does not have more memory"
    )


def device_here(is_cuda: bool) -> Device:
    """Return the first CUDA device of this machine, or the machine's CPU if `is_cuda` is False.

    Raises:
        UsageError: the CUDA device is not one of the known GPUs.
    """
    if not is_cuda:
        return this_cpu()
    import torch

    found = torch.cuda.get_device_properties(0)
    total = found.total_memory / GIB
    # The memory tells devices with the same name apart (a100-40, a100-80).
    fitting = [
        gpu
        for gpu in GPUS.values()
        if gpu.name.partition("-")[0] in found.name.lower() and abs(gpu.memory / GIB - total) < 4
    ]
    if not fitting:
        raise UsageError(
            f"this machine has a {found.name}, which is not in the table; name a similar one: --gpu {', '.join(GPUS)}"
        )
    return fitting[0]


def this_cpu() -> Device:
    """This machine's CPU: its memory, and its measured rates in one large matrix product and one large copy.

    The rates are measured in CPU time, so that other processes on the machine do not distort them.
    """
    import torch

    a = torch.ones(1024, 1024, device="cpu")
    num_threads = torch.get_num_threads()
    product = _fastest(lambda: a @ a, num_threads)
    # 64 MiB, so that the copy goes through memory and not only through caches.
    block = torch.ones(1 << 24, device="cpu")
    copy = _fastest(block.clone, num_threads)
    rate = 2 * 1024**3 / product
    flops = {"float32": rate, "bfloat16": rate * _gain()}
    return Device(
        name=CPU,
        memory=_host_memory(),
        flops=flops,
        # A copy reads and writes each byte. The processes of one machine exchange data through its memory.
        bandwidth=2 * block.nbytes / copy,
        link=block.nbytes / copy,
        is_cuda=False,
    )


def _gain() -> float:
    """The speed of bfloat16 products relative to float32; 1 if the processor has no bfloat16 instructions."""
    import torch

    from verbatim.models.instructions import has_bfloat16
    from verbatim.trainer.linear import product

    if not has_bfloat16():
        return 1.0
    a = torch.ones(1024, 1024, device="cpu")
    b = a.bfloat16()
    num_threads = torch.get_num_threads()
    # This is the product that the trainer uses. For float32, it chooses the faster of two libraries.
    return _fastest(lambda: product(a, a), num_threads) / _fastest(lambda: product(b, b), num_threads)


def _fastest(do: Callable[[], object], num_threads: int) -> float:
    """The duration in seconds of the fastest of a few calls: the CPU time of the call, divided by the number of
    threads, as if each thread had its own core."""
    seconds = []
    for _ in range(4):
        began = time.process_time()
        do()
        seconds.append(time.process_time() - began)
    return min(seconds) / num_threads


def _host_memory() -> int:
    """This machine's memory in bytes, or the memory limit of this process's control group if the limit is lower."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    # The files that contain the limit, for control groups of version 2 and of version 1.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # if the file is missing or says "max", there is no limit
            continue
    return total
