"""Defines a replica: a sampler over one server that reports its load and health."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verbatim.core.errors import SamplerFault
from verbatim.inference.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """A server's load. Counts begin with the server's start."""

    running: int = 0
    """Number of requests in the batch."""
    waiting: int = 0
    """Number of requests that wait to join the batch."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    cache_queries: int = 0
    """Number of prompt tokens looked up in the prefix cache."""
    cache_hits: int = 0
    """Number of prompt tokens found in the prefix cache."""
    generated_tokens: int = 0
    """Sampled tokens."""


@runtime_checkable
class SaysLoad(Protocol):
    """An engine that reports its load."""

    def load(self) -> ReplicaLoad:
        """The current load."""


class TooSlow(SamplerFault):
    """A replica exceeded a timeout, so it counts as hanging. The message names replica, phase and timeout."""


class Replica(Sampler, Protocol):
    """A `Sampler` over one server. Every method returns eventually, because each of its steps has a timeout."""

    @property
    def name(self) -> str:
        """The replica's name, for messages."""

    @property
    def num_unverified(self) -> int:
        """Number of tensors that no digest covered in the last update."""

    async def health(self) -> None:
        """Check that the server answers and that its engine is alive.

        Raises:
            SamplerFault: the server does not answer, or its engine is dead.
        """

    async def load_metrics(self) -> ReplicaLoad:
        """The server's load.

        Raises:
            SamplerFault: the server does not report its load.
        """


@runtime_checkable
class CanSleep(Protocol):
    """A replica that can release its device for the trainer."""

    @property
    def seconds_waking(self) -> float | None:
        """Seconds that the last wake-up took, without the loading of weights; None if the replica never slept."""

    async def sleep(self) -> None:
        """Release the device's memory: weights and KV cache. The replica has no request in flight, and gets none until
        the next `update_weights`, which wakes it up.

        Raises:
            SamplerFault: the replica did not fall asleep.
        """


class Rendezvous(Protocol):
    """Coordinates replicas that load a version at the same time, because the version is broadcast to all of them."""

    def expect(self, names: Collection[str], version: int, *, is_first: bool = False) -> None:
        """Announce that these replicas are about to load this version.

        Args:
            names: The replicas' names.
            version: The policy version.
            is_first: True for the initial weights of the run.
        """

    def leave(self, name: str) -> None:
        """Record that the replica with this name has loaded or failed, so that the other replicas do not wait for it. A
        name that was not passed to `expect` is ignored."""
