"""Supervises the replicas of a pool: removes replicas that die or hold wrong weights, and restarts replicas that
died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.tasks import cancel_all
from verbatim.core.texts import error_text, printable
from verbatim.inference.pool.admission_queue import AdmissionQueue
from verbatim.inference.pool.loading import (
    CheckLine,
    Limits,
    TargetWeights,
    fall_asleep,
    illness,
    load_and_check,
    within,
)
from verbatim.inference.pool.member import GivenUp, Member, ReplicaIncarnation
from verbatim.inference.pool.replica import Rendezvous, Replica, ReplicaLoad, TooSlow
from verbatim.inference.sampler import WeightCheck

logger = logging.getLogger(__name__)

MOST_LOST_IN_A_ROW = 5
"""Maximum number of losses without a completed request in between. A replica that is lost more often is not
restarted."""
SAY_EVERY = 60.0
"""Seconds between two warnings about a replica's failed requests."""
CLOSING = 10.0
"""Timeout for closing a replica, in seconds."""
MOST_CHECKUPS = 100.0
"""Maximum number of health checks per second, of all replicas together. If there are many replicas, each is checked
less often. A replica that fails on a request is checked immediately."""
LONGEST_PAUSE = 30.0
"""Maximum seconds before the restart of a replica that was lost several times in a row."""

Restart = Callable[[int], Awaitable[Replica]]
"""Stops the server with this index if it still runs, and starts it again."""


@dataclass
class ReplicaFaultCounts:
    """Numbers of faults since the start of the pool."""

    lost: int = 0
    """Number of replicas that died."""
    failed_checks: int = 0
    """Number of checks that found wrong weights."""
    faults: int = 0
    """Number of requests on which a replica failed without dying."""
    resent: int = 0
    """Number of requests that were sent again."""
    unknown: int = 0
    """Number of requests whose lost replica did not report how many tokens it had sampled."""
    lost_tokens: int = 0
    """Number of tokens known to have been sampled for lost requests."""


class ReplicaSupervisor:
    """Decides which members of a pool serve, load, sleep, restart or stay out.

    Args:
        members: All members, by index.
        queue: Admits requests to the members that serve.
        restart: Starts a server again. With None, a dead replica stays out.
        limits: The timeouts.
        target: The weights that the members have to hold.
        rendezvous: Coordinates members that load at the same time. With None, each member loads on its own.
    """

    def __init__(
        self,
        members: Sequence[Member],
        queue: AdmissionQueue,
        restart: Restart | None,
        limits: Limits,
        target: TargetWeights,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.members = members
        self.target = target
        """The weights that every member has to hold. A member that comes back loads them."""
        self.counts = ReplicaFaultCounts()
        self.failure: str | None = None
        """Why no replica is left; None while a replica serves or may come back."""
        self._queue = queue
        self._restart = restart
        self._limits = limits
        self._rendezvous = rendezvous
        self._line = CheckLine()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self._checkups: dict[ReplicaIncarnation, asyncio.Task[str | None]] = {}
        for member in members:
            queue.add(member.index)

    def begin(self) -> None:
        """Start watching the replicas' health."""
        for member in self.members:
            self._in_background(self._watch(member), f"watch-{member.index}")

    async def close(self) -> None:
        """Close every replica, and cancel the background tasks."""
        await cancel_all([*self._tasks, *self._checkups.values()])
        await asyncio.gather(*(_closed(member.replica) for member in self.members if member.state != "out"))
        if under_way := [call for member in self.members for call in member.incarnation.under_way]:
            await asyncio.wait(under_way, timeout=CLOSING)  # closed replicas end them as cancelled, with their tokens
        for member in self.members:
            if member.incarnation.under_way or not member.incarnation.is_proven:
                member.incarnation.end("the sampler is closed")

    # ---- weights

    async def bring_to(self, target: TargetWeights) -> None:
        """Load and check the target on every replica. This wakes replicas that sleep.

        Returns once a replica serves the target, or no replica is left.
        """
        self.target = target
        self._is_awake.set()
        self._queue.release()
        there = [member for member in self.members if member.state in ("serving", "asleep")]
        if self._rendezvous is not None:
            self._rendezvous.expect([member.name for member in there], target.version)
        await asyncio.gather(*map(self._bring, there))
        while self.failure is None and not any(member.state == "serving" for member in self.members):
            self._changed.clear()
            await self._changed.wait()

    async def check_first(self, check: WeightCheck) -> dict[str, str]:
        """Check the initial weights of the replicas.

        Returns:
            What is wrong with the weights, by the replica's name.
        """
        begins_with = replace(self.target, check=check)
        self.target = replace(begins_with, path=None)  # the replicas already hold these weights, so nothing is loaded
        found = await asyncio.gather(*(self._bring(member) for member in self.members))
        self.target = begins_with
        return {member.name: why for member, why in zip(self.members, found, strict=True) if why is not None}

    async def _bring(self, member: Member) -> str | None:
        """Load and check the target. After a failure the member is out or being restarted.

        Returns:
            What is wrong with the weights; None if nothing is wrong, or if the replica failed.
        """
        why = None
        with self._losing(member):
            why = await self._prove(member)
            if why is not None:
                self._retire(member, why)
            elif member.state != "serving":
                self._serve(member)
        return why

    @contextlib.contextmanager
    def _losing(self, member: Member) -> Iterator[None]:
        """Treat the member as lost if its replica fails in the block."""
        try:
            yield
        except GivenUp:
            pass  # the incarnation ended meanwhile, and the code that ended it has handled the loss
        except SamplerFault as fault:
            self.lose(member, member.incarnation, str(fault))

    async def _join(self, member: Member) -> None:
        """Load and check the newest target, then let the member serve.

        Raises:
            SamplerFault: the replica failed.
            GivenUp: the replica was lost meanwhile.
        """
        while True:
            target = self.target
            why = await self._prove(member)
            if why is not None:
                self._retire(member, why)
                return
            if target is self.target:  # otherwise a newer version was published meanwhile, which has to be loaded too
                self._serve(member)
                return

    async def _prove(self, member: Member) -> str | None:
        """Load and check the target. If the check fails, load and check the target once more.

        Returns:
            Why the check failed twice; None if the weights are right or the target is outdated (published folders are
            deleted after a while, so a failure to load an old folder proves nothing).
        """
        target = self.target
        for is_last in (False, True):
            incarnation = member.incarnation
            # A sleeping or paused server cannot prepare a check. A restarted server may have been left paused.
            incarnation.withhold()
            computes = not is_last and member.state not in ("asleep", "starting")
            try:
                why = await incarnation.ask(
                    load_and_check(incarnation.replica, target, self._limits, self._line, prepare=computes)
                )
            except TooSlow:
                raise
            except SamplerFault as fault:
                # A dead replica is restarted. A replica that is alive gets a second attempt.
                if await illness(incarnation.replica, self._limits) is not None:
                    raise
                why = str(fault)
            except OSError as error:
                if target is self.target:
                    raise
                why = error_text(error, 2000)
            finally:
                if self._rendezvous is not None:
                    self._rendezvous.leave(member.name)  # in any case, or the other replicas would wait for it
            if why is None:
                incarnation.prove(target.version)
                return None
            if target is not self.target:
                logger.info(
                    "%s loads policy version %d, because version %d is outdated: %s",
                    member.name,
                    self.target.version,
                    target.version,
                    printable(why),
                )
                return None
            self.counts.failed_checks += 1
            if is_last or target.path is None:  # without a folder there is nothing that could be loaded again
                return why
            logger.warning(
                "%s does not hold policy version %d: %s. Its replies are discarded, and it loads all weights again",
                member.name,
                target.version,
                printable(why),
            )
            self._set_aside(member, why)
        raise AssertionError("unreachable")

    # ---- sleep

    async def put_to_sleep(self) -> None:
        """Make every replica release its device once its requests have ended. New requests wait in the queue until
        `bring_to`.

        Returns once each replica is asleep or out. A replica that fails to fall asleep is treated as failed: it is
        restarted, then put to sleep. A replica that dies while it sleeps is restarted by `bring_to`, because until then
        the device is the trainer's.
        """
        self._queue.hold()
        while self.failure is None and not all(member.state in ("asleep", "out") for member in self.members):
            await self._queue.until_empty()
            awake = [member for member in self.members if member.state == "serving"]
            if awake:
                await asyncio.gather(*map(self._put_to_sleep, awake))
            else:  # the remaining replicas are loading or being restarted
                self._changed.clear()
                await self._changed.wait()
        self._is_awake.clear()

    async def _put_to_sleep(self, member: Member) -> None:
        with self._losing(member):
            await member.incarnation.ask(fall_asleep(member.replica, self.target, self._limits, self._line))
            member.state = "asleep"
            self._queue.remove(member.index)

    # ---- members leave and return

    def distrust(self, member: Member, incarnation: ReplicaIncarnation, why: str) -> None:
        """Load and check the weights again, because replies of this incarnation cannot be right."""
        # Several replies may show the same fault. Only the first of them makes the replica load again.
        if member.incarnation is not incarnation or member.state != "serving":
            return
        logger.warning("%s loads its weights again: %s", member.name, printable(why))
        self._set_aside(member, why)
        self._in_background(self._reload(member), f"reload-{member.index}")

    async def _reload(self, member: Member) -> None:
        with self._losing(member):
            await self._join(member)

    async def is_well(self, member: Member, incarnation: ReplicaIncarnation) -> bool:
        """True if the replica of a failed request still answers. If it does not, the member is treated as lost."""
        # All requests of an incarnation that fail at the same time share one health check.
        checkup = self._checkups.get(incarnation)
        if checkup is None:
            checkup = self._checkups[incarnation] = asyncio.create_task(illness(incarnation.replica, self._limits))
            checkup.add_done_callback(lambda _: self._checkups.pop(incarnation))
        why = await asyncio.shield(checkup)
        if why is not None:
            self.lose(member, incarnation, why)
        return why is None

    def failed_on_a_request(self, member: Member, why: str) -> None:
        """Count a failed request of a replica that is alive, and log it at most once in `SAY_EVERY` seconds."""
        self.counts.faults += 1
        now = asyncio.get_running_loop().time()
        if now - member.said_at >= SAY_EVERY:
            member.said_at = now
            logger.warning("%s is alive, but failed on a request: %s", member.name, printable(why))

    def lose(self, member: Member, incarnation: ReplicaIncarnation, why: str) -> None:
        """Remove a dead replica, and restart it. Its requests are sent to other replicas."""
        if member.incarnation is not incarnation or member.state in ("starting", "out"):
            return
        self.counts.lost += 1
        member.num_lost_in_a_row += 1
        num_running = self._queue.router.num_running(member.index)
        if self._restart is None or member.num_lost_in_a_row > MOST_LOST_IN_A_ROW:
            self._retire(member, why)
            return
        logger.warning(
            "%s is lost and will be restarted; its %d requests are sent again: %s",
            member.name,
            num_running,
            printable(why),
        )
        self._set_aside(member, why)
        member.state = "starting"
        self._in_background(self._start_again(member, self._restart), f"restart-{member.index}")

    async def _start_again(self, member: Member, restart: Restart) -> None:
        old = member.replica
        self._in_background(_closed(old), f"close-{member.index}")  # do not wait for a dead server, because it may hang
        while True:
            await asyncio.sleep(self._pause(member))
            await self._is_awake.wait()  # the trainer may be using the device
            try:
                replica = await within(self._limits.start, old, "the restart", restart(member.index))
                member.renew(member.why, replica)
                member.num_restarts += 1
                return await self._join(member)
            except (SamplerFault, UsageError, OSError) as error:
                member.why = error_text(error, 2000) if isinstance(error, OSError) else str(error)
            member.num_lost_in_a_row += 1
            if member.num_lost_in_a_row > MOST_LOST_IN_A_ROW:
                self._retire(member, member.why)
                return
            logger.warning("%s could not be restarted: %s", member.name, printable(member.why))

    def _pause(self, member: Member) -> float:
        """Seconds before the next restart: 0 after the first loss, then 1, 2, 4, ... up to `LONGEST_PAUSE`."""
        again = member.num_lost_in_a_row - 1
        return min(LONGEST_PAUSE, 2.0 ** (again - 1)) if again > 0 else 0.0

    def _serve(self, member: Member) -> None:
        member.state = "serving"
        self._queue.add(member.index)
        self._changed.set()
        logger.info("%s serves policy version %d", member.name, member.incarnation.version)

    def _set_aside(self, member: Member, why: str) -> None:
        """Send no more requests to the member, and give up its requests in flight."""
        self._queue.remove(member.index)
        member.renew(why)
        if member.state in ("serving", "asleep"):
            member.state = "loading"

    def _retire(self, member: Member, why: str) -> None:
        """Remove the member permanently. The run continues with the other members."""
        self._set_aside(member, why)
        member.state = "out"
        self._in_background(_closed(member.replica), f"close-{member.index}")
        left = [other.name for other in self.members if other.state != "out"]
        logger.error(
            "%s is out for the rest of the run, %d of %d replicas are left: %s",
            member.name,
            len(left),
            len(self.members),
            printable(why),
        )
        if not left:
            said = "; ".join(_named(other) for other in self.members)
            self.failure = f"no replica is left. {said}"
            self._queue.close()
        self._changed.set()

    # ---- the watch

    async def _watch(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        interval = max(self._limits.health_interval, len(self.members) / MOST_CHECKUPS)
        await asyncio.sleep(interval * member.index / len(self.members))  # spread the checks over the interval
        seen, since = (member.incarnation, -1, -1), loop.time()
        while member.state != "out":
            await asyncio.sleep(interval)
            incarnation = member.incarnation
            if member.state not in ("serving", "loading", "asleep"):
                continue
            why = await illness(incarnation.replica, self._limits)
            if why is None:
                member.load = await self._load_of(incarnation.replica) or member.load
                # Cache lookups count as progress too: a long prefill samples no token.
                now = (
                    incarnation,
                    *((member.load.generated_tokens, member.load.cache_queries) if member.load else (-1, -1)),
                )
                idle = not self._queue.router.num_running(member.index) or member.state != "serving"
                if now != seen or idle or member.load is None:
                    seen, since = now, loop.time()
                elif loop.time() - since > self._limits.stall:
                    why = f"{member.name}: the engine sampled no token in {self._limits.stall:g} s"
            if why is not None:
                self.lose(member, incarnation, why)

    async def _load_of(self, replica: Replica) -> ReplicaLoad | None:
        with contextlib.suppress(SamplerFault):  # the health check passed, so a missing load is not a failure
            return await within(
                self._limits.health, replica, "the answer to a query of its load", replica.load_metrics()
            )
        return None

    # ---- tasks

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self.failure = f"the pool of replicas failed: {error_text(error)}"  # a bug in this package
            self._queue.close()
            self._changed.set()


def _named(member: Member) -> str:
    """The replica's name, followed by what happened to it."""
    return member.why if member.why.startswith(member.name) else f"{member.name}: {member.why}"


async def _closed(replica: Replica) -> None:
    """Close a replica that may be dead."""
    try:
        await within(CLOSING, replica, "closing it", replica.close())
    except Exception as error:  # noqa: BLE001  (the server is given up, so nothing depends on closing it)
        logger.warning("%s could not be closed: %s", replica.name, printable(error_text(error)))
