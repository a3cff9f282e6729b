"""Starts the vLLM servers of a run, or finds them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from verbatim.core.disk import link_or_copy
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference.backends import BackendInputs
from verbatim.inference.http.uploads import Deliver
from verbatim.inference.pool.replica import Rendezvous
from verbatim.inference.pool.servers import FoundServers, Servers
from verbatim.inference.vllm.broadcast import WeightBroadcast
from verbatim.inference.vllm.command import MODEL_NAME
from verbatim.inference.vllm.process import ServerProcess, free_port, make_process
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.models.sizes import vocab_size_of
from verbatim.models.source import base_of, is_adapter

ATTEMPTS = 3
"""Maximum number of attempts to start a server, because another process may take its port before the server binds
it."""


def vllm_servers(inputs: BackendInputs, settings: VllmSettings) -> Servers:
    """The servers in `urls`, or else the servers that the run starts.

    Raises:
        UsageError: as for `VllmSettings.check_for`.
    """
    try:
        settings.check_for(context_length=inputs.context_length, adapter_rank=inputs.adapter_rank)
    except UsageError as error:
        raise UsageError(f"inference.vllm.{error}") from error
    broadcast = make_broadcast(inputs, settings)
    make = replica_maker(inputs, settings, broadcast)
    if not settings.urls:
        return StartedServers(inputs, settings, make, broadcast)
    return FoundServers(
        settings.urls,
        lambda url, name, version: make(url, name=name, policy_version=version, model=None, api_key=settings.api_key),
        weights=(Path(inputs.model), inputs.policy_version),
        patience=settings.start_timeout,
        setting="inference.vllm.start_timeout",
        rendezvous=broadcast,
    )


def make_broadcast(inputs: BackendInputs, settings: VllmSettings) -> WeightBroadcast | None:
    """The broadcast of weights to all servers; None if the servers load folders."""
    if inputs.sender is None or settings.broadcast is None:
        return None
    return WeightBroadcast(inputs.sender, kind=settings.broadcast.kind, update_timeout=settings.update_timeout)


def replica_maker(
    inputs: BackendInputs, settings: VllmSettings, broadcast: WeightBroadcast | None
) -> partial[VllmReplica]:
    """`VllmReplica` with the arguments that all replicas of a run share."""
    return partial(
        VllmReplica,
        context_length=settings.max_model_len or inputs.context_length,
        vocab_size=vocab_size_of(base_model(inputs.model)),
        adapter_rank=inputs.adapter_rank,
        on_weight_update=inputs.on_weight_update,
        return_routed_experts=inputs.return_routed_experts,
        return_kept_sets=inputs.return_kept_sets,
        weight_transfer=settings.weight_transfer,
        phase_timeout=settings.update_timeout,
        broadcast=broadcast,
    )


def is_taken_port(fault: SamplerFault) -> bool:
    """True if a server did not start because another process took its port."""
    return "address already in use" in str(fault).lower()


def node_connector(
    inputs: BackendInputs, settings: VllmSettings, api_key: str
) -> tuple[Callable[..., VllmReplica], Rendezvous | None]:
    """See `backends.CONNECTORS`."""
    broadcast = make_broadcast(inputs, settings)
    make = replica_maker(inputs, settings, broadcast)

    def connect(url: str, name: str, version: int, deliver: Deliver | None) -> VllmReplica:
        return make(url, name=name, policy_version=version, model=MODEL_NAME, api_key=api_key, deliver=deliver)

    return connect, broadcast


def base_model(model: str | Path) -> str | Path:
    """The model that a server is started with: the model itself, or the base model of an adapter."""
    return base_of(model) if is_adapter(model) else model


class StartedServers:
    """vLLM servers that the run starts and ends.

    Args:
        inputs: The run's inputs to its backend.
        settings: The table [inference.vllm].
        make: Constructor of a replica: `VllmReplica` with the arguments that all replicas share.
        rendezvous: Coordinates replicas that load at the same time. With None, each replica loads on its own.
    """

    def __init__(
        self,
        inputs: BackendInputs,
        settings: VllmSettings,
        make: partial[VllmReplica],
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._inputs, self._settings, self._make, self.rendezvous = inputs, settings, make, rendezvous
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if inputs.logs is not None:
            self._logs = inputs.logs
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix="verbatim-vllm-")
            self._logs = Path(self._temporary.name)
        self._key = secrets.token_urlsafe(24)
        self._processes: dict[int, ServerProcess] = {}
        self.weights: tuple[Path, int] = (Path(inputs.model), inputs.policy_version)
        """Folder and policy version of the weights that a server is started with."""

    def __len__(self) -> int:
        return self._settings.replicas

    async def start(self, index: int) -> VllmReplica:
        """Start a server with the weights in `weights`. An earlier process with the same index is stopped first.

        Raises:
            SamplerFault: the server does not start.
            OSError: the weights cannot be linked or copied.
        """
        if (former := self._processes.get(index)) is not None:
            await former.stop()  # still registered while it stops, so that `close` waits for it if this is cancelled
        path, version = self.weights
        if path == Path(self._inputs.model):
            return await self._start(index, path, version)
        kept = self._logs / f"replica_{index}.weights"
        await asyncio.to_thread(_keep, path, kept)  # the trainer may delete a published folder during a long start
        try:
            return await self._start(index, kept, version)
        finally:
            await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)

    start_again = start

    async def _start(self, index: int, model: Path, version: int) -> VllmReplica:
        for attempt in itertools.count(1):
            process = make_process(
                self._settings,
                index,
                model=base_model(model),
                port=free_port(),
                context_length=self._settings.max_model_len or self._inputs.context_length,
                logs=self._logs,
                num_threads=self._inputs.num_threads,
                api_key=self._key,
                adapter_rank=self._inputs.adapter_rank,
                return_routed_experts=self._inputs.return_routed_experts,
                return_kept_sets=self._inputs.return_kept_sets,
            )
            self._processes[index] = process
            try:
                await process.start(self._settings.start_timeout)
                return self._make(
                    process.url, name=f"replica {index}", policy_version=version, model=MODEL_NAME, api_key=self._key
                )
            except SamplerFault as fault:
                if attempt == ATTEMPTS or not is_taken_port(fault):
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the servers. Their logs are deleted too, unless the run has a folder for them."""
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(process.stop() for process in processes))
        if self._temporary is not None:
            self._temporary.cleanup()


def _keep(path: Path, kept: Path) -> None:
    """Hard-link the files of a published folder, or copy them if links are not possible."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(path, kept, copy_function=link_or_copy)
