"""Refuses, before anything is started, a trainer and a sampler on the same CUDA device unless they take turns on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from verbatim.config.schema import RunConfig
from verbatim.config.sections import BackendSettings, table_of
from verbatim.core.errors import UsageError
from verbatim.run.build import logprob_models

logger = logging.getLogger(__name__)


def check_turns(config: RunConfig, settings: BackendSettings) -> None:
    """Refuse a sampler that takes turns with the trainer on one device while rollouts run ahead.

    Args:
        config: The run's configuration.
        settings: The settings of the inference backend.

    Raises:
        UsageError: both turns and running ahead are configured; the message says what to type.
    """
    level = config.orchestrator.max_async_level
    if settings.shares_device and level:
        raise UsageError(
            f"inference.{table_of(config.inference.backend)}.colocate: sampler and trainer take turns on one device, "
            "so rollouts that run ahead of the trainer save no time and only make samples stale; found "
            f"orchestrator.max_async_level = {level}, expected 0: type orchestrator.max_async_level = 0, or leave out "
            "colocate"
        )


def check_placement(config: RunConfig, settings: BackendSettings) -> None:
    """Refuse a trainer, or a teacher loaded by the run, on a device of the sampler; the trainer may be there if the two
    take turns. Without CUDA nothing can overlap.

    The check assumes that this process starts trainer, sampler and teacher, so that they see the same devices.

    Args:
        config: The run's configuration.
        settings: The settings of the inference backend.

    Raises:
        UsageError: two of them are on the same device; the message names the device and says what to type.
    """
    table = f"inference.{table_of(config.inference.backend)}"
    taken = settings.cuda_devices()
    if not taken:
        return
    trainer = cuda_device(config.trainer.device)
    if trainer in taken and not settings.shares_device:
        raise UsageError(
            f"trainer.device = {config.trainer.device!r} is CUDA device {trainer}, which {table} also takes "
            f"({', '.join(taken)}): trainer and sampler would both fill its memory. "
            f"{_another('trainer.device', taken)}, or {table}.devices. To share "
            f"one device, type {table}.colocate = true and orchestrator.max_async_level = 0"
        )
    if settings.shares_device and trainer not in taken:
        logger.warning(
            "%s.colocate = true, and trainer.device = %r is not among the devices that %s takes (%s): taking turns "
            "only costs time; leave out colocate",
            table,
            config.trainer.device,
            table,
            ", ".join(taken),
        )
    for model in logprob_models(config).values():
        if model.base_url is None and (found := cuda_device(model.device)) in taken:
            raise UsageError(
                f"orchestrator.teacher.device = {model.device!r} is CUDA device {found}, one of those that {table} "
                f"takes ({', '.join(taken)}). {_another('orchestrator.teacher.device', taken)}, or serve it "
                "(orchestrator.teacher.base_url)"
            )


def cuda_device(device: str) -> str | None:
    """The CUDA device that a torch device name refers to, as listed in CUDA_VISIBLE_DEVICES; None if it refers to no
    CUDA device.

    Example: with CUDA_VISIBLE_DEVICES=4,5 "cuda:1" is "5", and "auto" is "4".
    """
    if device == "cpu":
        return None
    from verbatim.models.loading import resolve_device  # torch takes seconds to import

    found = resolve_device(device)
    if found.type != "cuda":
        return None
    visible = _visible()
    index = found.index or 0
    return str(index) if visible is None else visible[index]


def _visible() -> list[str] | None:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [name.strip() for name in named.split(",")]


def _another(key: str, taken: Collection[str]) -> str:
    """What to type so that this key names a free device, if a free device is visible to this process."""
    import torch

    visible = _visible() or [str(index) for index in range(torch.cuda.device_count())]
    free = [index for index, name in enumerate(visible) if name not in taken]
    return f'Type {key} = "cuda:{free[0]}"' if free else f"No other device is visible here; choose another {key}"
