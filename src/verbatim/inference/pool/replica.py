"""Defines a replica: a sampler over one server that says how busy it is and whether it lives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verbatim.core.errors import SamplerFault
from verbatim.inference.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """A server's own figures; counts are since it started."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    """Requests that wait for a place in it."""
    kv_usage: float = 0.0
    """Share of the key/value cache in use, 0 to 1."""
    cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    cache_hits: int = 0
    """Those that were found."""
    generated_tokens: int = 0
    """Tokens drawn."""


@runtime_checkable
class SaysLoad(Protocol):
    """An engine that says how busy it is."""

    def load(self) -> ReplicaLoad:
        """Its figures of now."""


class TooSlow(SamplerFault):
    """A replica took longer for something than its limit: it hangs. The message names replica, phase and limit."""


class Replica(Sampler, Protocol):
    """A `Sampler` over one server. Every method ends: each step of it has a limit of time."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def num_unverified(self) -> int:
        """Tensors of its weights that no digest tells of, as of the last update."""

    async def health(self) -> None:
        """Return if the server answers.

        Raises:
            SamplerFault: it does not, or its engine is dead.
        """

    async def load_metrics(self) -> ReplicaLoad:
        """How busy the server is.

        Raises:
            SamplerFault: the server does not say.
        """


@runtime_checkable
class CanSleep(Protocol):
    """A replica that can leave its device to the trainer."""

    @property
    def seconds_waking(self) -> float | None:
        """Seconds that its last waking took, without loading; None if it never slept."""

    async def sleep(self) -> None:
        """Release the device's memory, weights and cache. It has no request in flight, and gets none until the next
        `update_weights`, which wakes it up.

        Raises:
            SamplerFault: it did not.
        """


class Rendezvous(Protocol):
    """Where replicas meet that load a version at the same time, because it is sent to all of them at once."""

    def expect(self, names: Collection[str], version: int, *, is_first: bool = False) -> None:
        """These replicas are about to load this version.

        Args:
            names: Of the replicas.
            version: The policy version.
            is_first: Whether it is the one with which the run begins.
        """

    def leave(self, name: str) -> None:
        """A replica has loaded, or has failed: the others do not wait for it. Others than the expected ones count for
        nothing."""
