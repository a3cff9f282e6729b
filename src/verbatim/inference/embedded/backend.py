"""The inference backend of [inference.torch]: starts the embedded engine, or connects to running servers that use it.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.inference.backends import BackendInputs
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import Sampler

if TYPE_CHECKING:
    from verbatim.inference.http.replica import HttpReplica
    from verbatim.inference.http.uploads import Deliver
    from verbatim.inference.pool.servers import FoundServers


async def torch_backend(inputs: BackendInputs, settings: TorchSettings) -> Sampler:
    """The embedded sampler with the weights in `inputs.model`, or a pool of the servers in `urls`, each one checked.

    Raises:
        UsageError: the run cannot sample from a server; the message says what to type.
        SamplerFault: a server does not answer.
    """
    if settings.urls:
        from verbatim.inference.pool.servers import open_pool

        return await open_pool(found_servers(inputs, settings), settings)
    from verbatim.inference.embedded.engine import TorchSampler

    return TorchSampler(
        inputs.model,
        config=settings,
        context_length=inputs.context_length,
        policy_version=inputs.policy_version,
        num_threads=settings.num_threads or inputs.num_threads,
        # With a fixed number of threads there is nothing to share, and deterministic results may depend on the number
        # of threads.
        cores=inputs.cores if settings.num_threads is None and not settings.deterministic else None,
        on_weight_update=inputs.on_weight_update,
        return_routed_experts=inputs.return_routed_experts,
    )


def found_servers(inputs: BackendInputs, settings: TorchSettings) -> FoundServers:
    """The servers in `urls`."""
    from verbatim.inference.pool.servers import FoundServers

    return FoundServers(
        settings.urls,
        connector(inputs, settings, api_key=settings.api_key),
        weights=(Path(inputs.model), inputs.policy_version),
        patience=settings.start_timeout,
        setting="inference.torch.start_timeout",
    )


def node_connector(
    inputs: BackendInputs, settings: TorchSettings, api_key: str
) -> tuple[Callable[..., HttpReplica], None]:
    """See `backends.CONNECTORS`."""
    return connector(inputs, settings, api_key=api_key), None


def connector(inputs: BackendInputs, settings: TorchSettings, *, api_key: str | None) -> Callable[..., HttpReplica]:
    """A function that makes a replica from (1) the root URL of one of our servers, (2) the replica's name, (3) its
    policy version, and (4) what brings folders to the server's host, if anything does."""
    from verbatim.inference.http.replica import HttpReplica
    from verbatim.models.sizes import vocab_size_of

    vocab_size = vocab_size_of(inputs.model)

    how: dict[str, str] = {"dtype": settings.precision, "on_weight_update": inputs.on_weight_update}
    if inputs.return_routed_experts:
        how["return_routed_experts"] = "true"

    def connect(url: str, name: str, version: int, deliver: Deliver | None = None) -> HttpReplica:
        return HttpReplica(
            url,
            name=name,
            context_length=inputs.context_length,
            vocab_size=vocab_size,
            policy_version=version,
            how=how,
            api_key=api_key,
            weight_transfer="http" if settings.weight_transfer == "http" else "files",
            update_timeout=settings.update_timeout,
            deliver=deliver,
        )

    return connect
