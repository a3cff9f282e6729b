"""Manages one replica of a pool, and whether its replies are delivered, withheld, or given up."""

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
"""Maximum seconds to wait for a cancelled request to end."""

State = Literal["serving", "loading", "asleep", "starting", "out"]
"""The state of a replica. "serving": it gets requests. "loading": it loads weights or is being checked. "asleep": it
has released its device. "starting": it is being restarted. "out": it will not come back. Only a serving replica gets
requests."""


class GivenUp(Exception):
    """The replica of a request was lost, or sampled the reply with weights other than the published weights.

    Args:
        why: What happened to the replica.
        num_tokens: Number of tokens known to have been sampled for the request.
        is_known: True if the replica reported this number.
    """

    def __init__(self, why: str, num_tokens: int, *, is_known: bool) -> None:
        super().__init__(why)
        self.num_tokens = num_tokens
        self.is_known = is_known


class WrongVersions(SamplerFault):
    """A replica labelled tokens with policy versions that it did not hold when it sampled them."""


class ReplicaIncarnation:
    """A period in which a replica's replies count. It ends when the replica is lost or fails a check.

    Args:
        replica: The replica.
        version: The policy version of its weights.
        proven: True if its weights have passed their check.
    """

    def __init__(self, replica: Replica, version: int, *, proven: bool) -> None:
        self.replica = replica
        self.version = version
        """The last version that passed its check."""
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = loop.create_future()
        """Resolves to the reason when the incarnation ends."""
        self.under_way: set[asyncio.Future[Any]] = set()
        """Calls to the replica that have not ended yet."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """The waiters of all calls of `_until_ended`. The dict serves as an ordered set, so that waiters wake in the
        order in which they came."""
        self._proof: asyncio.Future[None] = loop.create_future()
        if proven:
            self._proof.set_result(None)

    @property
    def is_proven(self) -> bool:
        """True if replies are delivered."""
        return self._proof.done()

    def withhold(self) -> None:
        """Withhold replies until `prove`, because the weights are about to change."""
        if self._proof.done():
            self._proof = asyncio.get_running_loop().create_future()

    def prove(self, version: int) -> None:
        """Record that the weights of this version have passed their check, and deliver the withheld replies."""
        self.version = version
        if not self._proof.done():
            self._proof.set_result(None)

    def end(self, why: str) -> None:
        """End the incarnation: give up every request in flight and every withheld reply."""
        if not self.over.done():
            self.over.set_result(why)
            for waiting in self._waiting:
                _wake(waiting)

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample a completion, and return it once the weights that sampled it are verified.

        Raises:
            GivenUp: the replica was lost, or its weights are wrong.
            WrongVersions: tokens carry policy versions that the replica did not hold.
            SamplerFault: the replica failed on the request.
        """
        version = self.version
        completion = await self.ask(self.replica.generate(request))
        await self.until_proven(len(completion.ids))
        versions = completion.policy_versions
        # An update may happen during the request, so any version that was current between its start and now is right.
        if versions is not None and len(versions) and not version <= versions.min() <= versions.max() <= self.version:
            held = str(version) if version == self.version else f"{version} to {self.version}"
            raise WrongVersions(
                f"{self.replica.name} reports that policy versions {versions.min()} to {versions.max()} sampled a "
                f"completion, but it held {held}",
                num_tokens=len(completion.ids),
            )
        return completion

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Await the call, unless the incarnation ends first.

        Raises:
            GivenUp: the incarnation ended.
            asyncio.CancelledError: the caller was cancelled; the error carries the number of tokens sampled so far.
        """
        asking = asyncio.ensure_future(call)
        self.under_way.add(asking)
        asking.add_done_callback(self.under_way.discard)
        try:
            await self._until_ended(asking)
            if self.over.done() and not asking.done():
                await asyncio.sleep(0)  # let a call that fails at the same moment finish, so that its error is read
            if self.over.done() and not asking.done():
                asking.cancel()
                # Retrieve the exception, because otherwise asyncio would log that it was never retrieved.
                asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                await asyncio.wait({asking}, timeout=GIVING_UP)
        except asyncio.CancelledError:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # cancelled again: still report what was sampled
                await settle([asking])
            raise cancelled(_drawn(asking) or 0) from None
        if self.over.done():
            drawn = _drawn(asking)
            raise GivenUp(self.over.result(), drawn or 0, is_known=drawn is not None)
        return asking.result()

    async def until_proven(self, num_tokens: int) -> None:
        """Wait until the weights that sampled a reply are verified.

        Args:
            num_tokens: Number of sampled tokens in the reply.

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
        """Wait until the future is done or this incarnation is over.

        `asyncio.wait` is not used, because it would add a callback to `over` for each request in flight, and removing
        one callback takes time linear in the number of callbacks.
        """
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
    """A place in the pool, whose server may be replaced.

    Args:
        index: The replica's index.
        replica: The first server's replica.
    """

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self.name = replica.name
        self.incarnation = ReplicaIncarnation(replica, replica.policy_version, proven=True)
        self.state: State = "serving"
        self.why = ""
        """The last thing that happened to the replica, for messages."""
        self.num_restarts = 0
        self.num_lost_in_a_row = 0
        """Number of losses since the replica last completed a request."""
        self.said_at = -math.inf
        """Time, on the event loop's clock, of the last log line about a failed request."""
        self.load: ReplicaLoad | None = None
        """The last load that its server reported; None if it has not reported any yet."""

    @property
    def replica(self) -> Replica:
        """The current server's replica."""
        return self.incarnation.replica

    def renew(self, why: str, replica: Replica | None = None) -> None:
        """Begin a new, unverified incarnation. Requests in flight of the old incarnation are given up."""
        self.why = why
        self.incarnation.end(why)
        self.incarnation = ReplicaIncarnation(replica or self.replica, self.incarnation.version, proven=False)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _drawn(asking: asyncio.Future[Any]) -> int | None:
    """Number of tokens sampled for a request, or None if this number is unknown."""
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
