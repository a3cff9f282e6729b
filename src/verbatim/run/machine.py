"""Defines the properties of the machines of both sides on which the choice between float32 and bfloat16 depends."""

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
    """The linear layers of a model, without the output head."""

    sizes: Mapping[tuple[int, int], int]
    """Number of layers by (inputs, outputs)."""
    linear_alone: bool
    """True if all matrices of the decoder layers are in linear layers."""
    config: Any
    """The model's `transformers` configuration."""

    @property
    def mean_size(self) -> float:
        """Mean number of elements of a weight matrix."""
        total = sum(inputs * outputs * count for (inputs, outputs), count in self.sizes.items())
        return total / max(1, sum(self.sizes.values()))


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The cost of the same work in both dtypes: median processor time in seconds."""

    float32: float
    bfloat16: float
    of: str
    """What was measured, for messages."""


class Machine(Protocol):
    """The interface through which the choice of a dtype queries the machine of each side."""

    def place(self, side: Side) -> str:
        """Where this side computes, for messages: "here"."""

    def cuda_rounds(self, side: Side, device: str) -> bool | None:
        """True if the CUDA device named `device` computes in bfloat16; None if `device` means the CPU."""

    def has_instructions(self, side: Side) -> bool:
        """True if the processor has instructions that multiply bfloat16."""

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        """Time one side's work with these layers.

        `rows` is the number of tokens per product (trainer), or of sequences decoded together (sampler). `kernel` is
            used by the sampler.
        """


class OnCuda:
    """A `Machine` for planning: a CUDA device from the plan's table. All devices in that table can compute in
    bfloat16."""

    def place(self, side: Side) -> str:
        raise AssertionError("nothing is measured on a CUDA device")

    def cuda_rounds(self, side: Side, device: str) -> bool | None:
        """Always True. A side that runs on the CPU next to such a device is treated as if it ran on the device."""
        return True

    def has_instructions(self, side: Side) -> bool:
        raise AssertionError("not needed for a CUDA device")

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        raise AssertionError("not needed for a CUDA device")
