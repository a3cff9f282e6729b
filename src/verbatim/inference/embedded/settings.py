"""[inference.torch]: the embedded engine's settings."""

from __future__ import annotations

from typing import Literal

from verbatim.config.sections import PositiveInt, Replicas
from verbatim.core.errors import UsageError
from verbatim.inference.pool.settings import ServerSettings


class TorchSettings(ServerSettings):
    """The embedded sampler, in PyTorch: in the run's own process, or in running servers (`urls`)."""

    max_batch_size: PositiveInt = 64
    """Maximum number of sequences decoded together."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Number format of the weights and, in PyTorch, of all computations except logprobs. The compiled kernel uses
    bfloat16 only for matrices and, if the CPU multiplies bfloat16, for the inputs of their products; with AMX also for
    keys and values.
    "auto" is decided once, when a run begins: bfloat16 if a measurement shows that it is faster, and float32 for tiny
    models."""
    device: str = "auto"
    """Device that the engine computes on; "auto" uses CUDA if available."""
    kernel: Literal["auto", "torch", "compiled"] = "auto"
    """Implementation of the forward passes. "compiled" is a C kernel for models like Llama and Qwen3 on a CPU; "torch"
    is PyTorch; "auto" uses the kernel if it can be built and supports the model."""
    deterministic: bool = False
    """True to give the same ids and logprobs, bit for bit, for the same request, seed and weights, regardless of the
    rest of the batch."""
    prefill_chunk: PositiveInt = 2048
    """Maximum number of prompt tokens processed between two decode steps."""
    num_threads: PositiveInt | None = None
    """Number of threads for matrix products on a CPU; by default half of the cores while the trainer computes on this
    machine too, otherwise all cores."""

    weight_transfer: Literal["auto", "files", "http"] = "auto"
    """How new weights reach the servers in `urls`: "files" reads the published folder, at the same path there; "http"
    uploads it first. "auto" is "files"."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """The number format of the weights."""
        if self.dtype == "auto":
            raise UsageError(
                'dtype = "auto" is resolved only by a run and by verbatim eval, rollout, serve and inference; '
                'here use "float32" or "bfloat16"'
            )
        return self.dtype

    def planned(self) -> Replicas:
        """See `BackendSettings.planned`."""
        return Replicas(
            count=len(self.urls) or 1,
            devices_each=1,
            dtype=self.precision,
            most_sequences=self.max_batch_size,
            memory_share=1.0,
            packs=self.kernel != "torch",
        )

    def check(self) -> None:
        """Refuse a missing device, or invalid settings for servers."""
        if self.urls:
            super().check()
            return
        if self.device in ("auto", "cpu"):
            return  # the CPU is always available, and checking would import torch, which takes seconds
        from verbatim.models.loading import resolve_device

        try:
            resolve_device(self.device)
        except UsageError as error:
            raise UsageError(f"device: {error}") from error
