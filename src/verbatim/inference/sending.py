"""Defines how a sampler asks the trainer to send weights directly, so that no server has to read the published
folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verbatim.config.sections import BroadcastKind


@dataclass(frozen=True, kw_only=True)
class WeightStore:
    """The trainer's rendezvous store (`torch.distributed`), where the ranks of a weight group find each other."""

    host: str
    """Address of the trainer's host, reachable from the sampler's servers."""
    port: int
    """Port of the store."""
    on: str
    """Name of the trainer's host."""
    nccl: str | None = None
    """The trainer's NCCL version, which must be the same on all ranks of a group; None if the trainer has no CUDA."""


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """A request to the trainer to send the weights of a version to a group of receivers."""

    version: int
    """The policy version to send; the trainer must have it."""
    group: str
    """Name of the process group. A new name makes the trainer form a new group with the current receivers."""
    size: int
    """Number of ranks in the group: the trainer, which is rank 0, and the receivers."""
    kind: BroadcastKind
    """Transport of the broadcast."""
    seconds: float
    """Timeout in seconds for executing the order."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """Result of a `SendOrder`."""

    fault: str | None = None
    """The reason why the transfer failed; None if all tensors were sent."""
    num_bytes: int = 0
    """Total bytes of all tensors, counted once regardless of the number of receivers."""
    seconds: float = 0.0
    """Seconds that executing the order took."""
    seconds_meeting: float = 0.0
    """The part of `seconds` that passed until all ranks had joined the group."""


class WeightSender(Protocol):
    """The trainer's side of a weight transfer, as a sampler sees it."""

    @property
    def store(self) -> WeightStore:
        """The store through which receivers join the group."""

    async def send(self, order: SendOrder) -> SendReport:
        """Send the weights. The receivers have to receive at the same time, because a broadcast needs all ranks.

        Raises:
            RunStopped: the trainer is gone, or one of its processes failed.
        """
