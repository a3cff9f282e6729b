"""Determines how many devices trainer and sampler use: as many as the configuration requests, or as many as there
are."""

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
    """The devices of trainer and sampler."""

    processes: int
    """Number of trainer processes, each on its own device."""
    replicas: Replicas
    """The sampler's replicas."""
    where: Where
    """The place where the sampler runs, relative to the trainer."""

    @property
    def sampler_devices(self) -> int:
        """Number of devices on this machine that only the sampler uses."""
        return self.replicas.count * self.replicas.devices_each if self.where == "own devices" else 0

    @property
    def devices(self) -> int:
        """Number of devices that trainer and sampler use together on this machine."""
        return self.processes + self.sampler_devices


def place(config: RunConfig, *, is_cuda: bool, gpus: int | None) -> Placement:
    """Place a run's trainer and sampler on devices.

    Args:
        config: The run's configuration.
        is_cuda: True if the devices are CUDA devices. On a CPU, trainer and sampler share the machine.
        gpus: Number of available devices. The trainer takes the devices that the sampler leaves, unless the
            configuration sets the trainer's number of processes. If None, as many devices are available as the
            configuration requests.

    Raises:
        UsageError: there are too few devices.
    """
    settings = inference_settings(config)
    processes = config.trainer.parallel.processes
    replicas = settings.planned()
    if not is_cuda:
        where: Where = "beside the trainer"
    else:
        replicas = replace(replicas, packs=False)  # the compiled kernel exists only for CPUs
        where = "own devices"
        if isinstance(settings, TorchSettings) and _numbered(settings.device) == _numbered(config.trainer.device):
            where = "beside the trainer"
    if settings.shares_device:
        where = "in turns with the trainer"
    # The sampler's servers run already, or the devices of its backend are unknown here.
    if not isinstance(settings, ServerSettings) or settings.urls:
        where = "elsewhere"
    found = Placement(processes=processes, replicas=replicas, where=where)
    if gpus is None:
        return found
    if found.devices > gpus:
        raise UsageError(
            f"--gpus {gpus}, but the file requests {found.devices}: {processes} for the trainer "
            f"(trainer.parallel.processes) and {found.sampler_devices} for the sampler; lower them, or "
            "plan for more"
        )
    # The default is 1, so a 1 does not count as set by the configuration.
    if processes == 1 and may_be_several(config, found):
        return Placement(processes=gpus - found.sampler_devices, replicas=replicas, where=where)
    return found


def may_be_several(config: RunConfig, placement: Placement) -> bool:
    """True if this configuration allows the trainer to have several processes."""
    return config.trainer.separate_process and placement.where != "in turns with the trainer"


def _numbered(device: str) -> str:
    """A device's name with its index; "auto" and "cuda" both mean the first device."""
    return "cuda:0" if device in ("auto", "cuda") else device
