"""[inference.vllm]: the settings of vLLM's servers."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Literal, Self

from pydantic import Field, model_validator

from verbatim.config.sections import PositiveFloat, PositiveInt
from verbatim.errors import UsageError
from verbatim.inference.pool.settings import ServerSettings

_ASK_PYTHON = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"
_NO_VLLM = 3


class VllmSettings(ServerSettings):
    """vLLM servers, which the run starts (`replicas`) or finds (`urls`)."""

    replicas: PositiveInt = 1
    """Servers that the run starts, supervises and ends."""
    python: str = "python"
    """The Python of the environment that has vLLM: vLLM pins a torch of its own. `verbatim inference --install DIR`
    makes one; then this is "DIR/bin/python"."""
    tensor_parallel_size: PositiveInt = 1
    """Devices that share one replica's weights."""
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and completion together; by default orchestrator.seq_len."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights and activations. On a GPU usually "bfloat16"."""
    gpu_memory_utilization: PositiveFloat | None = None
    """Share of a device's memory that a replica takes, at most 1; by default vLLM's own."""
    devices: tuple[str, ...] = ()
    """CUDA devices of each replica, "0" or "0,1"; by default each replica has the next `tensor_parallel_size` devices,
    from 0 on, where there are any."""
    args: tuple[str, ...] = ()
    """Further options of the server, passed on: ["--enforce-eager"]."""
    env: dict[str, str] = Field(default={})
    """Further environment variables of the server: {VLLM_CPU_KVCACHE_SPACE = "1"}."""
    weight_transfer: Literal["auto", "files", "http", "nccl"] = "auto"
    """How new weights reach a server: "files" reads the published folder, which the server's host must have at the same
    path; "http" sends it to the server's host first; "nccl" sends tensors from device to device. "auto" is "files"."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.gpu_memory_utilization is not None and self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization: found {self.gpu_memory_utilization}, expected at most 1")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices: found {len(self.devices)} entries, expected one for each of the "
                             f"{self.replicas} replicas")  # fmt: skip
        if self.devices and any(len(entry.split(",")) != self.tensor_parallel_size for entry in self.devices):
            raise ValueError(f"devices: expected {self.tensor_parallel_size} in each entry (tensor_parallel_size), "
                             f"found {list(self.devices)}")  # fmt: skip
        return self

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """What it computes in; float16 has more digits than bfloat16 and fewer than float32."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    def check(self) -> None:
        """Refuse a Python without vLLM, a variable without a key, and addresses that are none."""
        super().check()
        if not self.urls:
            self._check_python()

    def _check_python(self) -> None:
        make = "`verbatim inference --install DIR` makes an environment with vLLM; then python = \"DIR/bin/python\""
        path = shutil.which(os.path.expanduser(self.python))
        if path is None:
            raise UsageError(f'python: there is no program "{self.python}". {make}')
        try:
            answer = subprocess.run([path, "-c", _ASK_PYTHON], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f'python: "{self.python}" cannot be run ({error}). {make}') from error
        if answer.returncode == _NO_VLLM:
            raise UsageError(f'python: the environment of "{self.python}" has no vLLM. {make}')
        if answer.returncode != 0:
            raise UsageError(f'python: "{self.python}" is no Python: it ended with status {answer.returncode}. {make}')
