"""Says which devices a run's two sides take: as many as its file asks for, or as there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from verbatim.config.schema import RunConfig
from verbatim.config.sections import Replicas
from verbatim.core.errors import UsageError
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.pool.settings import ServerSettings
from verbatim.run.rollouts import inference_settings

Where = Literal["own devices", "beside the trainer", "in turns with the trainer", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which side computes where."""

    processes: int
    """Processes of the trainer, each on a device of its own."""
    replicas: Replicas
    """Replicas of the sampler."""
    where: Where
    """Where the sampler is."""

    @property
    def sampler_devices(self) -> int:
        """Devices that the sampler has for itself here."""
        return self.replicas.count * self.replicas.devices_each if self.where == "own devices" else 0

    @property
    def devices(self) -> int:
        """Devices that both take here."""
        return self.processes + self.sampler_devices


def place(config: RunConfig, *, is_cuda: bool, gpus: int | None) -> Placement:
    """Where a run computes.

    Args:
        config: The run's configuration.
        is_cuda: Whether the devices are CUDA devices; on a CPU both sides share the machine.
        gpus: Devices that there are; the trainer takes those that the sampler leaves, unless the file says how many.
            None: as many as the file asks for.

    Raises:
        UsageError: there are too few.
    """
    settings = inference_settings(config)
    processes = config.trainer.parallel.processes
    replicas = settings.planned()
    if not is_cuda:
        where: Where = "beside the trainer"
    else:
        replicas = replace(replicas, packs=False)  # the kernel is for CPUs
        where = "own devices"
        if isinstance(settings, TorchSettings) and _numbered(settings.device) == _numbered(config.trainer.device):
            where = "beside the trainer"
    if settings.shares_device:
        where = "in turns with the trainer"
    if not isinstance(settings, ServerSettings) or settings.urls:
        where = "elsewhere"
    found = Placement(processes=processes, replicas=replicas, where=where)
    if gpus is None:
        return found
    if found.devices > gpus:
        raise UsageError(
            f"--gpus {gpus}, but the file asks for {found.devices}: {processes} for the trainer "
            f"(trainer.parallel.processes) and {found.sampler_devices} for the sampler; lower them, or "
            "plan for more"
        )
    if processes == 1 and may_be_several(config, found):
        return Placement(processes=gpus - found.sampler_devices, replicas=replicas, where=where)
    return found


def may_be_several(config: RunConfig, placement: Placement) -> bool:
    """Whether the trainer of this file may have several processes."""
    return config.trainer.separate_process and placement.where != "in turns with the trainer"


def _numbered(device: str) -> str:
    """A device's name with its number; both "auto" and "cuda" are the first one."""
    return "cuda:0" if device in ("auto", "cuda") else device
