"""Manages the servers behind a pool. They are checked before a run samples from them, and found again or restarted when
they are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.tasks import run_together
from verbatim.inference.pool.loading import Limits
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.pool.replica import Rendezvous, Replica
from verbatim.inference.pool.settings import ServerSettings
from verbatim.inference.sampler import WeightCheck

_ASK_EVERY = 2.0
"""Seconds between two health checks of a server that was lost."""


class ServerReplica(Replica, Protocol):
    """A replica that can check whether a run can sample from its server."""

    async def check_server(self) -> None:
        """Check how the server was started.

        Raises:
            UsageError: a run cannot sample from the server; the message says what to type.
            SamplerFault: the server cannot be reached.
        """

    async def prove_path(self, folder: Path) -> None:
        """Load the run's initial weights in the same way as all later updates, and verify them.

        Raises:
            UsageError: the weights do not arrive; the message says what to type.
            SamplerFault: the server failed.
        """


class Servers(Protocol):
    """The servers of a run, by index."""

    weights: tuple[Path, int]
    """Folder and version of the newest weights, with which a server is started."""
    rendezvous: Rendezvous | None
    """Coordinates replicas that load at the same time. With None, each replica loads on its own."""

    def __len__(self) -> int:
        """Number of servers."""

    async def start(self, index: int) -> ServerReplica:
        """Start or connect to a server for the first time. This does not check the server.

        Raises:
            SamplerFault: the server does not start.
        """

    async def start_again(self, index: int) -> ServerReplica:
        """Start or find a server that was lost. The pool then loads the weights into it again.

        Raises:
            UsageError: a different server answers.
            SamplerFault: the server does not come back.
        """

    async def close(self) -> None:
        """End the servers that the run started."""


class FoundServers:
    """Servers that the run did not start, and therefore cannot restart. The pool waits until a lost server is back.

    Args:
        urls: The servers' root URLs.
        connect: Makes a replica from a server's root URL, the replica's name for messages, and the policy version. This
            call sends no request to the server.
        weights: Folder and version of the run's initial weights.
        patience: Seconds within which a lost server must answer again.
        setting: Name of the setting that holds `patience`, for messages: "inference.vllm.start_timeout".
        rendezvous: Coordinates replicas that load at the same time. With None, each replica loads on its own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        connect: Callable[[str, str, int], ServerReplica],
        *,
        weights: tuple[Path, int],
        patience: float,
        setting: str,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._urls, self._connect = urls, connect
        self._patience, self._setting = patience, setting
        self.weights, self.rendezvous = weights, rendezvous

    def __len__(self) -> int:
        return len(self._urls)

    async def start(self, index: int) -> ServerReplica:
        """The server's replica; `check_server` shows whether the server answers."""
        url = self._urls[index]
        return self._connect(url, f"replica {index} ({url})", self.weights[1])

    async def start_again(self, index: int) -> ServerReplica:
        """See `Servers.start_again`; waits for the server and checks it."""
        replica = await self.start(index)
        try:
            async with asyncio.timeout(self._patience):
                while not await _answers(replica):  # noqa: ASYNC110 - a remote server's return is not an event here
                    await asyncio.sleep(_ASK_EVERY)
            await replica.check_server()  # it may have been restarted with different options
        except BaseException as error:
            await replica.close()
            if isinstance(error, TimeoutError):
                raise SamplerFault(
                    f"{replica.name} did not come back within {self._patience:g} s ({self._setting})"
                ) from None
            raise
        return replica

    async def close(self) -> None:
        """Do nothing, so that the servers keep running."""


async def _answers(replica: Replica) -> bool:
    try:
        await replica.health()
    except SamplerFault:
        return False
    return True


async def ask_servers(servers: Servers) -> None:
    """Check how each server was started, without loading weights.

    Raises:
        UsageError: the run cannot sample from a server; the message says what to type.
        SamplerFault: a server does not answer.
    """
    for index in range(len(servers)):
        replica = await servers.start(index)
        try:
            await replica.check_server()
        finally:
            await replica.close()


async def open_pool(servers: Servers, settings: ServerSettings) -> ServerPool:
    """The pool of all servers. Each server has been checked and holds the run's initial weights.

    Raises:
        UsageError: the run cannot sample from a server; the message says what to type.
        SamplerFault: a server does not start or answer.
    """
    opened: dict[int, ServerReplica] = {}
    path, version = servers.weights
    is_folder = await asyncio.to_thread(path.is_dir)
    try:
        await run_together(_open(servers, index, opened) for index in range(len(servers)))
        if servers.rendezvous is not None:
            servers.rendezvous.expect([replica.name for replica in opened.values()], version, is_first=True)
        await run_together(_prove(replica, path, version, is_folder=is_folder) for replica in opened.values())
    except BaseException:
        for replica in opened.values():
            await replica.close()
        await servers.close()
        raise
    return ServerPool(servers, [opened[index] for index in sorted(opened)], limits_of(settings))


def limits_of(settings: ServerSettings) -> Limits:
    """The pool's timeouts. The timeouts of a whole update and of a restart exceed the timeouts that the settings have
    for single phases, so that a phase's timeout expires first, and the error names the phase."""
    least = Limits()
    return Limits(
        silence=settings.health_timeout,
        stall=settings.stall_timeout,
        update=max(least.update, 3 * settings.update_timeout),
        start=max(least.start, 2 * settings.start_timeout),
    )


async def _open(servers: Servers, index: int, opened: dict[int, ServerReplica]) -> None:
    replica = opened[index] = await servers.start(index)
    await replica.check_server()


async def _prove(replica: ServerReplica, path: Path, version: int, *, is_folder: bool) -> None:
    if is_folder:  # a hub id has no folder to load, so the canary checks what the server itself loaded
        await replica.prove_path(path)
    if replica.policy_version != version:
        raise UsageError(
            f"{replica.name} holds policy version {replica.policy_version}, but the run begins with "
            f"version {version} of {path}; restart the server"
        )


class ServerPool(ReplicaPool):
    """A pool with one replica for each of the run's servers. A restarted server begins with the newest weights."""

    def __init__(self, servers: Servers, replicas: Sequence[ServerReplica], limits: Limits | None = None) -> None:
        path, _ = servers.weights
        super().__init__(
            replicas,
            restart=servers.start_again,
            on_close=servers.close,
            limits=limits,
            weights=path if path.is_dir() else None,
            rendezvous=servers.rendezvous,
        )
        self._servers = servers

    async def update_replicas(self, path: Path, version: int, check: WeightCheck | None) -> None:
        """See `ReplicaPool.update_replicas`."""
        self._servers.weights = (path, version)  # before the update: a server that dies in it restarts with these
        await super().update_replicas(path, version, check)
