"""The servers of a sampler's pool whose processes are Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.config.schema import RunConfig
from verbatim.core.errors import SamplerFault, VerbatimError
from verbatim.core.imports import import_object
from verbatim.inference.backends import CONNECTORS, BackendInputs
from verbatim.inference.http.uploads import Deliver
from verbatim.inference.pool.servers import ServerReplica
from verbatim.models.source import base_of, is_adapter
from verbatim.rollouts.ray.cluster import said_by_ray
from verbatim.run.cluster.placement import Reserved, num_replicas
from verbatim.run.cluster.rank_actor import ActorSetup
from verbatim.run.cluster.replica_actor import ReplicaActor
from verbatim.run.cluster.shipments import Shipments
from verbatim.run.rollouts import inference_settings

_CLOSE_SECONDS = 30.0
"""Seconds for a server to end by itself."""

Connect = Callable[[str, str, int, Deliver | None], ServerReplica]


class RayServers:
    """The `Servers` of a pool, on the nodes of a Ray cluster. A server that is lost starts again, on another node if
    its own is gone.

    Args:
        ray: The package, connected.
        config: The run's configuration.
        inputs: The run's inputs to its inference backend.
        reserved: The replicas' resources.
        setup: What each actor gets.
        shipments: Folders in the object store.
    """

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        inputs: BackendInputs,
        reserved: Reserved,
        setup: ActorSetup,
        shipments: Shipments,
    ) -> None:
        assert config.cluster is not None
        self._ray, self._reserved, self._setup, self._shipments = ray, reserved, setup, shipments
        self._patience = config.cluster.start_timeout
        self._key = secrets.token_urlsafe(24)
        settings = inference_settings(config)
        self._count = num_replicas(config)
        connector = import_object(CONNECTORS[config.inference.backend])
        self._connect, self.rendezvous = connector(inputs, settings, self._key)
        self._actors: dict[int, Any] = {}
        self.weights: tuple[Path, int] = (Path(inputs.model), inputs.policy_version)
        """Folder and policy version of the weights with which a server starts."""

    def __len__(self) -> int:
        return self._count

    async def start(self, index: int) -> ServerReplica:
        """Start a server. An earlier one with this index is ended first.

        Raises:
            SamplerFault: the server does not start.
        """
        await self._end(index)
        kind = self._ray.remote(ReplicaActor)
        actor = self._actors[index] = kind.options(**self._reserved.options(index), max_restarts=0).remote(
            self._setup, index, self._key
        )
        path, version = self.weights
        name = f"replica {index}"
        try:
            async with asyncio.timeout(self._patience):
                model = await self._deliver(actor, path)
                url = await self._ask(actor.start.remote(model, version), name)
        except TimeoutError:
            await self._end(index)
            raise SamplerFault(
                f"{name} did not start on the cluster within {self._patience:g} s (cluster.start_timeout)"
            ) from None
        connect: Connect = self._connect
        # Without the URL, which changes at each start: replicas that load together wait for each other by name.
        return connect(url, name, version, lambda folder: self._deliver(actor, folder))

    start_again = start

    async def _deliver(self, actor: Any, path: Path) -> str:
        """Bring a folder of the run folder to a replica's node; return its path there. Other folders, and hub ids, are
        expected to be there already."""
        root = self._shipments.root
        if self._setup.shared is not None or not path.is_relative_to(root):
            return str(path)
        if is_adapter(path) and (base := Path(base_of(path))).is_relative_to(root):
            await self._deliver(actor, base)  # the adapter names its base model by path
        for is_last in (False, True):
            shipped = await asyncio.to_thread(self._shipments.of, path)
            try:
                return str(await self._ask(actor.take.remote(shipped), "a replica"))
            except self._ray.exceptions.ObjectLostError as error:
                self._shipments.forget(path)  # the node that put it there is gone; this machine has it too
                if is_last:
                    raise SamplerFault(f"weights did not reach a replica: {said_by_ray(error)}") from error
        raise AssertionError("unreachable")

    async def _ask(self, reference: Any, name: str) -> Any:
        errors = self._ray.exceptions
        try:
            return await reference
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.ObjectLostError):
                raise error.cause from None
            if isinstance(error.cause, VerbatimError):
                raise error.cause from None
            raise SamplerFault(f"{name}: {said_by_ray(error.cause)}") from error
        except errors.RayActorError as error:
            raise SamplerFault(f"{name} is gone: {said_by_ray(error)}") from error

    async def _end(self, index: int) -> None:
        actor = self._actors.pop(index, None)
        if actor is None:
            return
        with contextlib.suppress(Exception):  # it may be gone
            async with asyncio.timeout(_CLOSE_SECONDS):
                await actor.close.remote()
        self._ray.kill(actor)

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(self._end(index) for index in list(self._actors)))
