"""[inference.torch]: the embedded engine's settings."""

from __future__ import annotations

from typing import Literal

from verbatim.config.sections import PositiveInt, Replicas
from verbatim.core.errors import UsageError
from verbatim.inference.pool.settings import ServerSettings


class TorchSettings(ServerSettings):
    """The embedded sampler, in PyTorch: in the run's own process, or in servers that exist (`urls`)."""

    max_batch_size: PositiveInt = 64
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Number format of weights, and where PyTorch computes of all else too, logprobs excepted. The compiled kernel has
    only matrices in bfloat16, and where the processor multiplies it (AVX512-BF16) inputs of layers' products. "auto" is
    chosen once, when a run begins: bfloat16 where that is faster, by measuring; float32 for tiny models."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    kernel: Literal["auto", "torch", "compiled"] = "auto"
    """What computes its passes. "compiled" is a function that the machine's C compiler builds once, in seconds, for
    models like Llama and Qwen3 on a CPU; "auto" takes it where it can be built and fits the model, else "torch",
    PyTorch."""
    deterministic: bool = False
    """Same request, seed and weights: same ids and logprobs, bit for bit, whatever else is in the batch."""
    prefill_chunk: PositiveInt = 2048
    """Most prompt tokens processed between two decode steps."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU; by default half of the cores while the trainer computes on
    this machine too, and all of them while it does not."""

    weight_transfer: Literal["auto", "files", "http"] = "auto"
    """How new weights reach the servers in `urls`: "files" reads the published folder, which a server's host must have
    at the same path; "http" sends it there first. "auto" is "files"."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """What it computes in."""
        if self.dtype == "auto":
            raise UsageError(
                'dtype = "auto" is chosen by a run, verbatim eval, rollout, serve or inference; here '
                'give "float32" or "bfloat16"'
            )
        return self.dtype

    def planned(self) -> Replicas:
        """As `BackendSettings.planned`."""
        return Replicas(
            count=len(self.urls) or 1,
            devices_each=1,
            dtype=self.precision,
            most_sequences=self.max_batch_size,
            memory_share=1.0,
            packs=self.kernel != "torch",
        )

    def check(self) -> None:
        """Refuse a missing device, or servers that cannot be reached in this way."""
        if self.urls:
            super().check()
            return
        if self.device in ("auto", "cpu"):
            return  # they are everywhere, and torch takes seconds to import
        from verbatim.models.loading import resolve_device

        try:
            resolve_device(self.device)
        except UsageError as error:
            raise UsageError(f"device: {error}") from error
