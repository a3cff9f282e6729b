"""Moves a trainer's tensors between device and host memory when sampler and trainer share a device (handoff)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Move = Callable[[Tensor, torch.device], Tensor]
HOST = torch.device("cpu")


class DeviceMemory:
    """All tensors of a trainer that outlive a step: parameters, gradients, buffers, optimizer state.

    Moving replaces the storage, not the tensor objects, so the references that model and optimizer hold stay valid. On
    a CPU nothing is moved.

    Args:
        model: The model being trained.
        optimizer: The model's optimizer.
        device: The device that model and optimizer compute on.
        move: Copies a tensor to a device.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, move: Move = Tensor.to
    ) -> None:
        self._model, self._optimizer, self._device, self._move = model, optimizer, device, move

    def leave(self) -> float:
        """Copy everything to host memory and give the device memory back to the driver. Returns the time taken in
        seconds."""
        if self._device == HOST:
            return 0.0
        seconds = self._bring_to(HOST)
        gc.collect()  # tensors in reference cycles hold device memory too
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes cannot use blocks that torch's allocator caches
        return seconds

    def come_back(self) -> float:
        """Copy everything back to the device. Returns the time taken in seconds.

        Raises:
            RuntimeError: the device has too little free memory.
        """
        return 0.0 if self._device == HOST else self._bring_to(self._device)

    def _bring_to(self, place: torch.device) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.data = self._move(tensor.data, place)
        return time.perf_counter() - began

    def _tensors(self) -> Iterator[Tensor]:
        """All tensors, each one once: tied parameters are a single tensor."""
        seen: set[int] = set()
        for tensor in self._all():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def _all(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        states: Any = self._optimizer.state
        for state in states.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
