"""Defines what a choice between float32 and bfloat16 asks of the machine that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Dtype = Literal["float32", "bfloat16"]
Side = Literal["trainer", "sampler"]
Kernel = Literal["auto", "torch", "compiled"]
"""`inference.torch.kernel`."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The linear layers of a model, output head left out."""

    sizes: Mapping[tuple[int, int], int]
    """How many have so many inputs and outputs."""
    linear_alone: bool
    """Whether the decoder layers have no other matrices."""
    config: Any
    """The configuration of `transformers`."""

    @property
    def mean_size(self) -> float:
        """Numbers in a matrix, in the mean."""
        total = sum(inputs * outputs * count for (inputs, outputs), count in self.sizes.items())
        return total / max(1, sum(self.sizes.values()))


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The same work in both, medians of processor time."""

    float32: float
    bfloat16: float
    of: str
    """What was measured."""


class Machine(Protocol):
    """What a choice asks of the machine that computes."""

    def cuda_rounds(self, device: str) -> bool | None:
        """Whether the CUDA device that `device` means computes in bfloat16; None: it means the CPU."""

    def has_instructions(self) -> bool:
        """Whether the processor multiplies bfloat16."""

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        """Time what one side does with the layers of a model; a sampler by what computes its passes."""


class OnCuda:
    """A `Machine` of the table of a plan's devices, which all compute in bfloat16."""

    def cuda_rounds(self, device: str) -> bool | None:
        """They do; a side that is on the CPU beside them is taken for one of them."""
        return True

    def has_instructions(self) -> bool:
        raise AssertionError("a CUDA device was asked")

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        raise AssertionError("a CUDA device was asked")
