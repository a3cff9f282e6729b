"""Keeps activations in host memory from the forward pass to the backward pass.

On CUDA the copies run on a separate stream: out while the next layer computes, and back one layer ahead of the backward
pass. So the device holds the inputs of two layers instead of the inputs of all layers.
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
    """A saved tensor in host memory."""

    host: Tensor
    before: weakref.ref[_OffloadedTensor] | None
    """The tensor that was saved before this one, and that the backward pass needs after this one. A weak reference,
    because autograd owns and frees the tensor."""
    back: Tensor | None = None
    """The copy on the device; None until the copying has been started."""


class ActivationOffload:
    """Keeps saved tensors in host memory: each tensor that autograd saves is copied there, and copied back, bit for
    bit, when the backward pass needs the tensor.

    Args:
        device: The device that computes the activations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: weakref.ref[_OffloadedTensor] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Context manager: tensors that autograd saves while the block runs go to host memory."""
        return saved_tensors_hooks(self._keep, self._bring_back)

    def _keep(self, tensor: Tensor) -> _OffloadedTensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=self._stream is not None)
        if self._stream is None:
            host.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the tensor may still be being computed
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory must not be reused before the copy is done
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
            back.record_stream(current)  # allocated on the copy stream, but used on this one
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
    """The offload for this device; None on a CPU, where activations are in host memory already (a warning says so)."""
    if device.type == "cpu":
        logger.warning("trainer.activation_offload saves nothing on a CPU: activations are already in host memory")
        return None
    return ActivationOffload(device)
