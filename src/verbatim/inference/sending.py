"""Defines how a sampler asks the trainer to send it weights, where it does not read what the trainer publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verbatim.config.sections import BroadcastKind


@dataclass(frozen=True, kw_only=True)
class WeightStore:
    """Where the trainer serves the store in which senders and receivers of weights meet."""

    host: str
    """An address of the trainer's host that the sampler's servers reach."""
    port: int
    """Where it listens there."""
    on: str
    """The name of that host."""
    nccl: str | None = None
    """Version of the trainer's NCCL: all ranks of a group need the same one. None where there is no CUDA."""


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """A request to the trainer: send the weights of a version to a group of receivers."""

    version: int
    """The policy version that the trainer holds."""
    group: str
    """The group's name. Another one than before is made anew, with these receivers."""
    size: int
    """Ranks of the group: the trainer, which is rank 0, and the receivers."""
    kind: BroadcastKind
    """How."""
    seconds: float
    """Limit for all of it."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """What came of a `SendOrder`."""

    fault: str | None = None
    """Why not all tensors were sent; None: they were."""
    num_bytes: int = 0
    """Bytes of the tensors that were sent, to all receivers at one time."""
    seconds: float = 0.0
    """Seconds of the whole order."""
    seconds_meeting: float = 0.0
    """Those of them until the group was complete."""


class WeightSender(Protocol):
    """The trainer, as a sampler sees it."""

    @property
    def store(self) -> WeightStore:
        """Where receivers meet it."""

    async def send(self, order: SendOrder) -> SendReport:
        """Send the weights; the receivers of the group have to receive meanwhile.

        Raises:
            RunStopped: the trainer is gone, or one of its processes failed.
        """
