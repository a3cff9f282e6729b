"""Lists the inference backends by name, and defines the inputs for starting one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.config.inference import OnWeightUpdate
from verbatim.inference.sending import WeightSender
from verbatim.models.native.cores import CoreShare


@dataclass(frozen=True, kw_only=True)
class BackendInputs:
    """What a run passes to its inference backend, in addition to the backend's own settings."""

    model: str | Path
    """Initial weights: a folder in Hugging Face format, or a hub id. With `adapter_rank` it may be an adapter's folder,
    which names its base model."""
    context_length: int
    """Maximum number of tokens in prompt and completion together."""
    policy_version: int = 0
    """Policy version of the initial weights."""
    num_threads: int | None = None
    """Threads for a backend that computes on this machine; None: one for each core."""
    cores: CoreShare | None = None
    """Reports how many threads a backend on this machine may use now; None: always `num_threads`."""
    on_weight_update: OnWeightUpdate = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive."""
    return_routed_experts: bool = False
    """True if completions must include the mixture-of-experts experts that computed each token."""
    return_kept_sets: bool = False
    """True if completions must include the kept set of each token. A backend whose servers return kept sets only on
    request has to configure its servers for it."""
    adapter_rank: int | None = None
    """Rank of the low-rank adapters in weight updates; None: updates hold full weights."""
    sender: WeightSender | None = None
    """The trainer, if it sends weights to the backend's servers; None: the servers read the published folders."""
    logs: Path | None = None
    """Folder for the output of the backend's processes; None: the output is discarded."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Addresses and access settings of standalone servers."""

    host: str
    """Address to listen on."""
    port: int
    """Port of the first server; the others use the ports after it."""
    api_key: str | None
    """Key that every request must carry; None: no key is required."""
    uploads: Path | None
    """Folder for uploaded weights; None: uploads are refused."""


SAMPLERS: Mapping[str, str | Callable[[BackendInputs, Any], Any]] = {
    "torch": "verbatim.inference.embedded.backend:torch_backend",
    "vllm": "verbatim.inference.vllm.backend:vllm_backend",
}
"""By backend name: `backend(inputs: BackendInputs, settings) -> Sampler`, or its import path; `async def` if startup
takes time. The annotation of `settings`, a subclass of `BackendSettings`, defines the keys of [inference.NAME].
Importing a backend's module must not import torch or vLLM: reading the configuration imports it."""

SERVERS: Mapping[str, str] = {
    "torch": "verbatim.inference.embedded.backend:found_servers",
    "vllm": "verbatim.inference.vllm.servers:vllm_servers",
}
"""By backend name: `servers(inputs, settings) -> Servers`, for backends that can use servers which already run."""
STANDING: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.standing:StandingVllm"}
"""By backend name: `standing(inputs, settings, listening)`, standalone servers for runs on other hosts, for backends
that compute in other processes than the serving one. Has `urls`, `named`, `start()`, `keep_running()`, `close()`."""
INSTALLERS: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.install:install_vllm"}
"""By backend name: `install(folder, build, say)`, for backends with their own Python environment; returns the path of
its interpreter."""
