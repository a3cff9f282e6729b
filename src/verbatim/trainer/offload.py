"""Keeps activations in host memory from the forward pass to the backward pass.

On CUDA the copies run on a stream of their own: out while the next layer computes, and back one layer ahead of the
backward pass. So the device holds the inputs of two layers instead of those of all.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


@dataclass(eq=False)
class _OffloadedTensor:
    """A tensor that waits in host memory."""

    host: Tensor
    before: weakref.ref[_OffloadedTensor] | None
    """The one that was saved before it, which the backward pass asks for next."""
    back: Tensor | None = None
    """Its copy on the device, where that is on its way or there."""


class ActivationOffload:
    """Copies what autograd saves to host memory, and back when the backward pass asks for it: bit for bit the same.

    Args:
        device: Where the activations are made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """A context: what autograd saves in it goes to host memory."""
        return saved_tensors_hooks(self._keep, self._bring_back)

    def _keep(self, tensor: Tensor) -> _OffloadedTensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=self._stream is not None)
        if self._stream is None:
            host.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory is not used again before the copy is done
        kept = _OffloadedTensor(host, self._last)
        self._last = weakref.ref(kept)
        return kept

    def _bring_back(self, kept: _OffloadedTensor) -> Tensor:
        self._start_back(kept)
        back, kept.back = kept.back, None
        assert back is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            back.record_stream(current)
            before = None if kept.before is None else kept.before()
            if before is not None:
                self._start_back(before)
        return back

    def _start_back(self, kept: _OffloadedTensor) -> None:
        if kept.back is not None:
            return
        if self._stream is None:
            kept.back = kept.host.to(self._device, copy=True)
            return
        with torch.cuda.stream(self._stream):
            kept.back = kept.host.to(self._device, non_blocking=True)


def activation_offload(device: torch.device) -> ActivationOffload | None:
    """What moves activations off this device; None on a CPU, with a warning: there they are in host memory anyway."""
    if device.type == "cpu":
        logger.warning("trainer.activation_offload saves nothing on a CPU: activations are in host memory as it is")
        return None
    return ActivationOffload(device)
