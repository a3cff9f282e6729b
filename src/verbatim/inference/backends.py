"""Lists the inference backends by name, and defines the inputs that each is started with."""

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
    """What a run gives to its inference backend, beside the backend's own settings."""

    model: str | Path
    """A folder in Hugging Face format, or a hub id: the weights to begin with. With `adapter_rank` maybe the folder of
    an adapter, which names its base model."""
    context_length: int
    """Most tokens of prompt and completion together."""
    policy_version: int = 0
    """The version of these weights."""
    num_threads: int | None = None
    """The backend's share of this machine's cores, for one that computes here; None: all of them."""
    cores: CoreShare | None = None
    """Tells a backend that computes here how many threads it may have now; None: `num_threads` all the time."""
    on_weight_update: OnWeightUpdate = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive."""
    return_routed_experts: bool = False
    """Whether completions have the experts of a mixture that computed each token."""
    return_kept_sets: bool = False
    """Whether completions have the ids among which each token was drawn, where some were cut off; a backend whose
    servers return them only where they are told to has to tell them."""
    adapter_rank: int | None = None
    """Rank of the low-rank adapters that updates bring; None: they bring whole weights."""
    sender: WeightSender | None = None
    """The trainer, where it sends its weights to the backend's servers; None: they read what it publishes."""
    logs: Path | None = None
    """A folder for what the backend's processes print; None keeps nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where servers that stand by themselves listen, and to whom."""

    host: str
    """The address."""
    port: int
    """Of the first one; the next ones follow."""
    api_key: str | None
    """What every request must bring; None: nothing."""
    uploads: Path | None
    """Where weights land that are sent; None: none are taken."""


SAMPLERS: Mapping[str, str | Callable[[BackendInputs, Any], Any]] = {
    "torch": "verbatim.inference.embedded.backend:torch_backend",
    "vllm": "verbatim.inference.vllm.backend:vllm_backend",
}
"""`backend(inputs: BackendInputs, settings) -> Sampler` by name, or where each lives; `async def` where starting takes
time. The annotation of `settings`, a subclass of `BackendSettings`, has the keys of [inference.NAME]. Importing a
backend's module loads nothing heavy."""

SERVERS: Mapping[str, str] = {
    "torch": "verbatim.inference.embedded.backend:found_servers",
    "vllm": "verbatim.inference.vllm.servers:vllm_servers",
}
"""`servers(inputs, settings) -> Servers` of the backends whose servers a run may find."""
STANDING: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.standing:StandingVllm"}
"""`standing(inputs, settings, listening)`: servers for runs on other hosts, of the backends that do not compute in the
process that serves: `urls`, `named`, `start()`, `keep_running()`, `close()`."""
INSTALLERS: Mapping[str, str] = {"vllm": "verbatim.inference.vllm.install:install_vllm"}
"""`install(folder, build, say)`, of the backends that have a Python environment of their own; returns its Python."""
