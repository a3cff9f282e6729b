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
    """The inputs that a run passes to its inference backend, in addition to the backend's own settings."""

    model: str | Path
    """Initial weights: a folder in Hugging Face format, or a hub id. If `adapter_rank` is set, the folder of an adapter
    is allowed too; the adapter's configuration names the base model."""
    context_length: int
    """Maximum number of tokens in prompt and completion together."""
    policy_version: int = 0
    """Policy version of the initial weights."""
    num_threads: int | None = None
    """Number of threads for a backend that computes on this machine; None for one thread per core."""
    cores: CoreShare | None = None
    """Reports how many threads a backend on this machine may use now; None if the backend may always use
    `num_threads`."""
    on_weight_update: OnWeightUpdate = "recompute"
    """How the key/value cache of sequences in flight is treated when new weights arrive."""
    return_routed_experts: bool = False
    """True if completions must include the experts (of a mixture-of-experts model) that computed each token."""
    return_kept_sets: bool = False
    """True if completions must include the kept set of each token. A backend whose servers do not return kept sets by
    default has to configure them to do so."""
    adapter_rank: int | None = None
    """Rank of the low-rank adapters in weight updates; None if updates have full weights."""
    sender: WeightSender | None = None
    """The trainer, if it sends weights to the backend's servers itself; None if the servers read the published
    folders."""
    logs: Path | None = None
    """Folder for the output of the backend's processes; None to discard the output."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Addresses and access settings of standalone servers."""

    host: str
    """Address to listen on."""
    port: int
    """Port of the first server; each further server uses the next port."""
    api_key: str | None
    """Key that every request must carry; None if no key is required."""
    uploads: Path | None
    """Folder for uploaded weights; None to refuse uploads."""


SAMPLERS: Mapping[str, str | Callable[[BackendInputs, Any], Any]] = {
    "torch": "verbatim.inference.embedded.backend:torch_backend",
    "vllm": "verbatim.inference.vllm.backend:vllm_backend",
}
"""By backend name: a function `backend(inputs: BackendInputs, settings) -> Sampler`, or its import path. It may be
`async def` if startup takes time. The annotation of `settings`, a subclass of `BackendSettings`, defines the keys of
[inference.NAME]. The module of a backend must not import torch or vLLM, because it is imported when the configuration
is read."""

SERVERS: Mapping[str, str] = {
    "torch": "verbatim.inference.embedded.backend:found_servers",
    "vllm": "verbatim.inference.vllm.servers:vllm_servers",
}
"""By backend name: a function `servers(inputs, settings) -> Servers`, for backends that can connect to running
servers."""
NODE_SERVERS: Mapping[str, str] = {
    "torch": "verbatim.inference.embedded.on_node:serve_on_node",
    "vllm": "verbatim.inference.vllm.on_node:serve_on_node",
}
"""By backend name: a function that runs one server in an actor on a node of a cluster, for backends that can be placed
there. See `verbatim.inference.vllm.on_node`."""
CONNECTORS: Mapping[str, str] = {
    "torch": "verbatim.inference.embedded.backend:node_connector",
    "vllm": "verbatim.inference.vllm.servers:node_connector",
}
"""By backend name: a function `connector(inputs, settings, api_key)` for the same backends. It returns (1) a function
that makes a replica from the URL of a server, the replica's name, its policy version and a `Deliver`, and (2) the
`Rendezvous` of all replicas, or None."""
STANDING: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.standing:StandingVllm"}
"""By backend name: a function `standing(inputs, settings, listening)` that makes standalone servers for runs on other
hosts. Only backends that compute in separate processes have such a function. The result has `urls`, `named`, `start()`,
`keep_running()` and `close()`."""
INSTALLERS: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.install:install_vllm"}
"""By backend name: a function `install(folder, build, say)`, for backends that run in a separate Python environment.
The function returns the path of that environment's interpreter."""
