"""Loads a version of the weights into one replica and checks it; every step has a limit of time that names it."""

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
"""Replicas whose weights are checked at a time. Each asks for one thing after the other, so no more answers than these
are there in one turn of the event loop."""
LONGEST_TURN = 5.0
"""Seconds after which a check that goes on makes room for the next: replicas that hang hold up no others."""
HEALTH_CHECKS = 2
"""Refused or broken connections, one after the other, after which a replica counts as dead."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of time, in seconds."""

    health_interval: float = 1.0
    """Between two checks of a replica's health."""
    health: float = 15.0
    """For the answer to one of them; a replica's own limit is shorter."""
    silence: float = 60.0
    """Without an answer to any of them: the replica counts as dead."""
    stall: float = 600.0
    """Without a token while requests are in flight: the engine behind the server hangs."""
    update: float = 900.0
    """For a replica to load new weights. A replica's own limits for the phases of an update are shorter."""
    check: float = 300.0
    """For the check of its weights."""
    start: float = 1800.0
    """For a server that is started again to answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetWeights:
    """What every replica is to hold."""

    path: Path | None
    """The folder of the weights; None: what replicas are started with."""
    version: int
    check: WeightCheck | None
    """Shows whether a replica holds them; None: nothing is checked."""


class CheckLine:
    """Lets at most `MOST_CHECKS` replicas be checked at a time. The others wait; what they sample is withheld."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_CHECKS)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place; it is given back when the block ends, or after `LONGEST_TURN`."""
        await self._places.acquire()
        held = [self._places]

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
    """Bring a replica to the target. What shows that it does not hold these weights; None if it does.

    Args:
        replica: The replica.
        target: What it is to hold.
        limits: Limits of time.
        line: Where replicas wait to be checked.
        prepare: Whether the check prepares it. A replica that sleeps, or whose last update failed, computes nothing.

    Raises:
        SamplerFault: the replica failed.
        TooSlow: it took too long; names the phase.
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
        return f"it says that it holds policy version {replica.policy_version}, and was told to load {version}"
    if check is None:
        return None
    async with line.turn():
        return await within(limits.check, replica, f"the check of policy version {version}", check(replica))


async def fall_asleep(replica: Replica, target: TargetWeights, limits: Limits, line: CheckLine) -> None:
    """Make a replica release its device's memory; the check of its next weights is prepared before.

    Raises:
        SamplerFault: the replica failed.
        TooSlow: it took too long; names the phase.
    """
    assert isinstance(replica, CanSleep)  # the settings of others do not share a device
    if target.check is not None:
        async with line.turn():
            filling = target.check.prepare(replica)
            await within(limits.check, replica, "filling the prefix cache before it sleeps", filling)
    await within(limits.update, replica, "falling asleep", replica.sleep())


async def illness(replica: Replica, limits: Limits) -> str | None:
    """Why a replica counts as dead; None if it answers.

    A refused connection or an error says that it is gone; silence may be a busy machine, so it has longer.
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
    """What the call returns.

    Raises:
        TooSlow: it took longer; names replica, phase and limit.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise TooSlow(f"{replica.name}: {phase} took more than {seconds:g} s") from None
