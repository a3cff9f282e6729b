"""Loads a version of the weights into one replica and checks it. Each step has a timeout, whose error names the
step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference.pool.replica import CanSleep, Replica, TooSlow
from verbatim.inference.sampler import WeightCheck

T = TypeVar("T")

MOST_CHECKS = 64
"""Maximum number of replicas whose weights are checked at the same time. A check has one request in flight, so this
also limits how many replies one pass of the event loop has to handle."""
LONGEST_TURN = 5.0
"""Seconds after which a slow check no longer counts against `MOST_CHECKS`, so that replicas that hang do not block
others."""
HEALTH_CHECKS = 2
"""Number of consecutive refused or broken connections after which a replica counts as dead."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts, in seconds."""

    health_interval: float = 1.0
    """Time between two health checks of a replica."""
    health: float = 15.0
    """Timeout of one health check. The replica's own timeout for a health check is shorter."""
    silence: float = 60.0
    """Time without an answer to any health check after which the replica counts as dead."""
    stall: float = 600.0
    """Time without a new token after which an engine that has requests in flight counts as hung."""
    update: float = 900.0
    """Timeout for loading new weights. A replica's own timeouts for the phases of an update are shorter."""
    check: float = 300.0
    """Timeout for the check of a replica's weights."""
    start: float = 1800.0
    """Timeout for the restart of a server, counted until the server answers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetWeights:
    """The weights that every replica has to hold."""

    path: Path | None
    """Folder of the weights; None means the weights that replicas are started with."""
    version: int
    check: WeightCheck | None
    """Verifies that a replica holds the weights; None means that there is no check."""


class CheckLine:
    """Limits how many replicas are checked at the same time. The replies of waiting replicas are withheld."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_CHECKS)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a slot. The slot is released when the block ends, and at the latest after `LONGEST_TURN`, even if
        the block continues."""
        await self._places.acquire()
        held = [self._places]  # emptied by the first release: the timer and the end of the block may both come

        def leave() -> None:
            if held:
                held.pop().release()

        timer = asyncio.get_running_loop().call_later(LONGEST_TURN, leave)
        try:
            yield
        finally:
            timer.cancel()
            leave()


async def load_and_check(
    replica: Replica, target: TargetWeights, limits: Limits, line: CheckLine, *, prepare: bool = True
) -> str | None:
    """Load the target into a replica, and check it.

    Args:
        replica: The replica.
        target: The weights that the replica has to hold.
        limits: The timeouts.
        line: Limits how many replicas are checked at the same time.
        prepare: True to let the check prepare the replica before loading. Must be False if the replica sleeps or its
            last update failed, because such a replica cannot compute anything.

    Returns:
        Why the replica does not hold these weights; None if it holds them.

    Raises:
        SamplerFault: the replica failed.
        TooSlow: a phase took too long; the error names the phase.
    """
    version, check = target.version, target.check
    if target.path is not None:
        if check is not None and prepare:
            async with line.turn():
                await within(limits.check, replica, "filling the prefix cache before an update", check.prepare(replica))
        try:
            loading = replica.update_weights(target.path, version)
            await within(limits.update, replica, f"loading policy version {version}", loading)
        except UsageError as error:
            return f"policy version {version} cannot be loaded: {error}"
    if replica.policy_version != version:
        return f"it reports policy version {replica.policy_version}, but was told to load {version}"
    if check is None:
        return None
    async with line.turn():
        return await within(limits.check, replica, f"the check of policy version {version}", check(replica))


async def fall_asleep(replica: Replica, target: TargetWeights, limits: Limits, line: CheckLine) -> None:
    """Make a replica release its device's memory. The check of its next weights is prepared first, because a sleeping
    replica cannot compute anything.

    Raises:
        SamplerFault: the replica failed.
        TooSlow: a phase took too long; the error names the phase.
    """
    assert isinstance(replica, CanSleep)  # `colocate` is accepted only for backends whose replicas can sleep
    if target.check is not None:
        async with line.turn():
            filling = target.check.prepare(replica)
            await within(limits.check, replica, "filling the prefix cache before it sleeps", filling)
    await within(limits.update, replica, "falling asleep", replica.sleep())


async def illness(replica: Replica, limits: Limits) -> str | None:
    """Why a replica counts as dead, or None if it answers.

    A refused connection or an error shows quickly that the replica is gone. A missing answer may only mean that the
    machine is busy, so it is tolerated for longer.
    """
    loop = asyncio.get_running_loop()
    began, refused = loop.time(), 0
    while True:
        try:
            await within(limits.health, replica, "the answer to a health check", replica.health())
        except TooSlow:
            silent = loop.time() - began
            if silent >= limits.silence:
                return f"{replica.name} has answered no health check for {silent:.0f} s"
        except SamplerFault as fault:
            refused += 1
            if refused == HEALTH_CHECKS:
                return str(fault)
        else:
            return None


async def within(seconds: float, replica: Replica, phase: str, call: Awaitable[T]) -> T:
    """Await the call, with a timeout.

    Raises:
        TooSlow: the call timed out; the error names replica, phase and timeout.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():  # the call itself raised TimeoutError
            raise
        raise TooSlow(f"{replica.name}: {phase} took more than {seconds:g} s") from None
