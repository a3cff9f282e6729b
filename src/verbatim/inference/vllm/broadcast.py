"""Updates all replicas at the same time: the trainer broadcasts its tensors to the workers of every server.

```
replica    pause, start update, arrive          each at its own pace; a replica that fails leaves
broadcast  begins once all have arrived or left reuses the process group of the last update if the members are the same
trainer    enters the group, broadcasts layer by layer   the servers receive and load meanwhile
replica    digests, version, resume             as after every update
```

A failure ends the process group for all of its ranks. The surviving replicas then load the published folder, and the
next update creates a new group.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.config.sections import BroadcastKind
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.texts import printable
from verbatim.inference.sending import SendOrder, SendReport, WeightSender
from verbatim.inference.vllm.control import VllmControl

logger = logging.getLogger(__name__)

_SHARE = 0.8
"""Fraction of `update_timeout` after which a broadcast counts as failed. The remaining time is used to load the files
instead."""


@dataclass(eq=False)
class _Round:
    """One update: the replicas that are expected, and the replicas that have arrived."""

    version: int
    is_first: bool
    """True for the run's initial weights: a failed broadcast then raises `UsageError` instead of falling back to
    files."""
    expected: set[str]
    arrived: dict[str, VllmControl] = field(default_factory=dict)
    loading: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The load request to each server, after the broadcast has begun."""
    outcome: asyncio.Task[dict[str, BaseException | str | None]] | None = None
    """By replica: why its server or the broadcast failed, or None if the server has all tensors."""
    begun: asyncio.Future[asyncio.Task[dict[str, BaseException | str | None]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Resolves to the outcome task once all replicas have arrived."""


class WeightBroadcast:
    """State shared by all replicas of a run. Implements `pool.replica.Rendezvous`.

    Args:
        sender: Sends the trainer's tensors.
        kind: Transport of the tensors: "nccl" or "gloo".
        update_timeout: Timeout of each phase of an update, in seconds.
    """

    def __init__(self, sender: WeightSender, *, kind: BroadcastKind, update_timeout: float) -> None:
        self.sender, self.kind = sender, kind
        self._seconds = _SHARE * update_timeout
        self._round: _Round | None = None
        self._members: tuple[VllmControl, ...] = ()
        self._run, self._num_groups = uuid.uuid4().hex[:8], 0
        self._sizes: dict[VllmControl, int] = {}

    def expect(self, names: Collection[str], version: int, *, is_first: bool = False) -> None:
        """Announce that these replicas are about to load this version."""
        self._round = _Round(version, is_first, set(names))

    def leave(self, name: str) -> None:
        """Record that this replica has loaded or is lost, so that the broadcast no longer waits for it."""
        if (now := self._round) is None:
            return
        if now.outcome is None:
            now.expected.discard(name)
            now.arrived.pop(name, None)
            self._begin_if_complete(now)
        elif name in now.loading:
            now.loading[name].cancel()

    async def load(self, name: str, control: VllmControl) -> bool:
        """Load the broadcast weights into a paused server. Returns False if the server has to load the folder instead.

        Raises:
            SamplerFault: the server failed.
            UsageError: the initial weights of the run do not arrive.
            RunStopped: the trainer failed.
        """
        # Queried before the replica arrives, because the last arrival starts the broadcast, which needs all sizes.
        if control not in self._sizes:
            self._sizes[control] = await control.num_workers()
        now = self._round
        if now is None or name not in now.expected or now.outcome is not None:
            return False
        now.arrived[name] = control
        self._begin_if_complete(now)
        # Shielded, because the other replicas await the same tasks, and cancelling one replica must not cancel these.
        outcome = await asyncio.shield(now.begun)
        why = (await asyncio.shield(outcome))[name]
        if isinstance(why, BaseException):
            raise why
        if why is not None and now.is_first:
            raise UsageError(
                f'inference.vllm.weight_transfer = "{self.kind}": the trainer\'s tensors do not reach the servers: '
                f"{why}. Check that the servers can connect to {self.sender.store.host}, port {self.sender.store.port} "
                "(the trainer's host), and that this host can connect to the servers. Set "
                "inference.vllm.transfer_address to another address of the trainer's host, "
                'or use "files" or "http"'
            )
        return why is None

    def _begin_if_complete(self, now: _Round) -> None:
        if now.outcome is None and now.arrived and now.expected == now.arrived.keys():
            now.outcome = asyncio.create_task(self._broadcast(now), name=f"broadcast-{now.version}")
            now.begun.set_result(now.outcome)

    async def _broadcast(self, now: _Round) -> dict[str, BaseException | str | None]:
        names = sorted(now.arrived)
        members = tuple(now.arrived[name] for name in names)
        # Connecting a group takes seconds, so it is reused while its members stay the same.
        if members != self._members:
            self._num_groups += 1
            self._members = members
        order = SendOrder(
            version=now.version,
            group=f"{self._run}-{self._num_groups}",
            size=1 + sum(self._sizes[c] for c in members),
            kind=self.kind,
            seconds=self._seconds,
        )
        sending = asyncio.create_task(self.sender.send(order))
        self._receive(order, now, dict(zip(names, members, strict=True)))
        why = await self._watch(order, sending, now.loading)
        if why is not None:
            self._members = ()  # a failed group cannot be reused, so the next update creates a new one
            logger.warning(
                "policy version %d could not be broadcast, and is loaded from its folder instead: %s",
                now.version,
                printable(why),
            )
        await sending  # raises if the trainer itself failed
        return {name: _fault_of(name, task) or why for name, task in now.loading.items()}

    def _receive(self, order: SendOrder, now: _Round, members: Mapping[str, VllmControl]) -> None:
        """Ask every server to receive. Ranks are assigned in the order of the replicas' names."""
        store, first = self.sender.store, 1  # rank 0 is the trainer
        for name, control in members.items():
            about = {
                "host": store.host,
                "port": store.port,
                "name": order.group,
                "size": order.size,
                "kind": order.kind,
                "seconds": order.seconds,
                "first_rank": first,
            }
            now.loading[name] = asyncio.create_task(control.load({"group": about}))
            first += self._sizes[control]

    async def _watch(
        self, order: SendOrder, sending: asyncio.Task[SendReport], loading: Mapping[str, asyncio.Task[None]]
    ) -> str | None:
        """Wait until the trainer and all servers are done. The first failure ends the group, so that no rank hangs.

        Returns:
            The first failure; None if all tensors arrived.
        """
        named: dict[asyncio.Task[Any], str] = {sending: "the trainer", **{task: name for name, task in loading.items()}}
        why, waiting = None, set(named)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                fault: BaseException | str | None = _fault_of(named[task], task)
                if fault is None and task is sending:
                    fault = sending.result().fault
                if fault is not None and why is None:
                    why = str(fault)
                    store = self.sender.store
                    await asyncio.to_thread(_end_group, store.host, store.port, order.group, why)
        return why


def _fault_of(name: str, task: asyncio.Task[Any]) -> BaseException | None:
    if task.cancelled():
        return SamplerFault(f"{name} is lost")
    return task.exception()


def _end_group(host: str, port: int, name: str, why: str) -> None:
    # Imported here, because the module needs torch, and this package must stay light.
    from verbatim.inference.vllm.plugin.verbatim_weight_group import end_group

    end_group(host, port, name, why)
