"""One replica of a pool: which of its answers are delivered, which are withheld, and which are given up."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from verbatim.core.errors import SamplerFault
from verbatim.inference.cancelled import cancelled, num_tokens_drawn, settle
from verbatim.inference.pool.replica import Replica, ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest

T = TypeVar("T")

GIVING_UP = 5.0
"""Most seconds to wait until a request that is given up has ended."""

State = Literal["serving", "loading", "asleep", "starting", "out"]
"""Requests go to it; it loads or is checked, and gets none; it has released its device, and gets none; it is started
again; it will not come back."""


class GivenUp(Exception):
    """A request whose replica was lost, or whose answer was sampled with weights that are not the published ones.

    Args:
        why: What happened to the replica.
        num_tokens: Tokens known to have been drawn for it.
        is_known: Whether the replica said how many tokens it had drawn.
    """

    def __init__(self, why: str, num_tokens: int, *, is_known: bool) -> None:
        super().__init__(why)
        self.num_tokens = num_tokens
        self.is_known = is_known


class WrongVersions(SamplerFault):
    """A replica labelled tokens with versions that it did not hold when it sampled them."""


class ReplicaIncarnation:
    """A replica, as long as its answers count. It ends when the replica is lost or fails a check.

    Args:
        replica: The replica.
        version: The version of its weights.
        proven: Whether its weights have passed their check.
    """

    def __init__(self, replica: Replica, version: int, *, proven: bool) -> None:
        self.replica = replica
        self.version = version
        """The version whose check passed last."""
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = loop.create_future()
        """Done when its answers do not count any more: why."""
        self.under_way: set[asyncio.Future[Any]] = set()
        """Calls of the replica that have not ended."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """For one of those to end, or this incarnation; first come, first woken."""
        self._proof: asyncio.Future[None] = loop.create_future()
        if proven:
            self._proof.set_result(None)

    @property
    def is_proven(self) -> bool:
        """Whether its answers are delivered."""
        return self._proof.done()

    def withhold(self) -> None:
        """Deliver nothing more until `prove`: its weights are about to change."""
        if self._proof.done():
            self._proof = asyncio.get_running_loop().create_future()

    def prove(self, version: int) -> None:
        """Its weights of this version have passed their check: deliver what was withheld."""
        self.version = version
        if not self._proof.done():
            self._proof.set_result(None)

    def end(self, why: str) -> None:
        """Give up every request in flight, and what was withheld."""
        if not self.over.done():
            self.over.set_result(why)
            for waiting in self._waiting:
                _wake(waiting)

    async def generate(self, request: SampleRequest) -> Completion:
        """A completion, once the weights that sampled it are proven.

        Raises:
            GivenUp: the replica was lost, or its weights are wrong.
            WrongVersions: tokens carry versions that the replica did not hold.
            SamplerFault: the replica failed on the request.
        """
        version = self.version
        completion = await self.ask(self.replica.generate(request))
        await self.until_proven(len(completion.ids))
        versions = completion.policy_versions
        if versions is not None and len(versions) and not version <= versions.min() <= versions.max() <= self.version:
            held = str(version) if version == self.version else f"{version} to {self.version}"
            raise WrongVersions(
                f"{self.replica.name} says that policy versions {versions.min()} to {versions.max()} sampled a "
                f"completion, while it held {held}",
                num_tokens=len(completion.ids),
            )
        return completion

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call returns or raises, unless the incarnation ends before.

        Raises:
            GivenUp: the incarnation ended.
            asyncio.CancelledError: the caller is cancelled; holds how many tokens had been drawn.
        """
        asking = asyncio.ensure_future(call)
        self.under_way.add(asking)
        asking.add_done_callback(self.under_way.discard)
        try:
            await self._until_ended(asking)
            if self.over.done() and not asking.done():
                await asyncio.sleep(0)  # a call that fails at the same moment comes to its end, and its failure is read
            if self.over.done() and not asking.done():
                asking.cancel()
                asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may be left behind
                await asyncio.wait({asking}, timeout=GIVING_UP)
        except asyncio.CancelledError:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # cancelled again: what was drawn is said in either case
                await settle([asking])
            raise cancelled(_drawn(asking) or 0) from None
        if self.over.done():
            drawn = _drawn(asking)
            raise GivenUp(self.over.result(), drawn or 0, is_known=drawn is not None)
        return asking.result()

    async def until_proven(self, num_tokens: int) -> None:
        """Wait for the proof of an answer of so many tokens.

        Raises:
            GivenUp: the incarnation ended.
        """
        try:
            await self._until_ended(self._proof)
        except asyncio.CancelledError:
            raise cancelled(num_tokens) from None
        if self.over.done():
            raise GivenUp(self.over.result(), num_tokens, is_known=True)

    async def _until_ended(self, future: asyncio.Future[Any]) -> None:
        """Wait until the future is done, or this incarnation is over. `asyncio.wait` would add a callback to `over` for
        each request in flight, and search all of them when one ends."""
        if future.done() or self.over.done():
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None

        def wake(_: object) -> None:
            _wake(waiting)

        future.add_done_callback(wake)
        try:
            await waiting
        finally:
            del self._waiting[waiting]
            future.remove_done_callback(wake)


class Member:
    """A replica's seat in the pool, whichever server takes it.

    Args:
        index: Its number.
        replica: The first server.
    """

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self.name = replica.name
        self.incarnation = ReplicaIncarnation(replica, replica.policy_version, proven=True)
        self.state: State = "serving"
        self.why = ""
        """What happened to it last."""
        self.num_restarts = 0
        self.num_lost_in_a_row = 0
        """Losses since it last completed a request."""
        self.said_at = -math.inf
        """When the log said last that it failed on a request."""
        self.load: ReplicaLoad | None = None
        """What its server said last; None if it never did."""

    @property
    def replica(self) -> Replica:
        """The server that it has now."""
        return self.incarnation.replica

    def renew(self, why: str, replica: Replica | None = None) -> None:
        """Begin a new incarnation, unproven: what the old one has in flight is given up."""
        self.why = why
        self.incarnation.end(why)
        self.incarnation = ReplicaIncarnation(replica or self.replica, self.incarnation.version, proven=False)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _drawn(asking: asyncio.Future[Any]) -> int | None:
    """Tokens known to have been drawn for a request; None where nothing is known."""
    if not asking.done():
        return None
    if asking.cancelled():
        try:
            asking.result()
        except asyncio.CancelledError as end:
            return num_tokens_drawn(end) if hasattr(end, "num_tokens") else None
    error = asking.exception()
    if error is None:
        result = asking.result()
        return len(result.ids) if isinstance(result, Completion) else 0
    return num_tokens_drawn(error) or None if isinstance(error, SamplerFault) else None
