"""Many replicas behind one `Sampler`: requests are routed, lost requests are sent again, and every update is verified.

```
generate   admission to a replica (admission_queue.py, routing.py)    the one that holds the prefix, or the least loaded
           its reply (member.py)                          withheld while the replica's weights are not verified
           the replica is lost, or its weights are wrong  the reply is discarded and counted, the request sent elsewhere

update     all replicas at the same time (replica_supervisor.py)      prepare, load, check (loading.py)
           a check fails                                  give up its requests in flight; load and check again; then out
           a replica dies                                 out at once; restarted, loaded, checked, back

sleep      all replicas, once their requests have ended   until the next update, which also restarts those that died
```
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from verbatim.core.errors import EngineDead, RunStopped, SamplerFault
from verbatim.core.types import Float32, Int32, StopReason
from verbatim.inference.cancelled import cancelled, num_tokens_drawn
from verbatim.inference.pool.admission_queue import AdmissionQueue
from verbatim.inference.pool.loading import Limits, TargetWeights
from verbatim.inference.pool.member import GivenUp, Member, ReplicaIncarnation, WrongVersions
from verbatim.inference.pool.metrics import PoolMetrics
from verbatim.inference.pool.replica import Rendezvous, Replica
from verbatim.inference.pool.replica_supervisor import ReplicaSupervisor, Restart
from verbatim.inference.pool.routing import Router
from verbatim.inference.sampler import Completion, SampleRequest, WeightCheck, nothing_sampled
from verbatim.inference.validation import check_ids, check_prompt, check_temperature

T = TypeVar("T")

MOST_ATTEMPTS = 4
"""Maximum number of replicas that a request is sent to. If all of them are lost, the request fails, because the request
itself may be what kills the replicas."""
MOST_FAULTS = 2
"""Number of replicas that may fail on a request while they stay alive. After that many failures, the request fails."""
CLOSED = "the sampler is closed; create a new one"


class ReplicaPool:
    """A `ReplicatedSampler` for one event loop. Other processes reach it through the run's own server.

    Args:
        replicas: The replicas, all with weights of the same version; `check_replicas` checks them.
        restart: Called with the index of a dead replica. It ends the replica's server if that still runs, starts the
            server again, and returns the new replica, into which the pool loads the current weights. With None, a dead
            replica stays out.
        weights: Folder of the initial weights, which a replica that comes back loads; None if servers are started with
            these weights.
        most_running: Maximum requests in flight on one replica; further requests wait in the queue.
        limits: The timeouts; None means the defaults.
        rendezvous: Coordinates replicas that load at the same time. With None, each replica loads on its own.
        on_close: Called by `close` after the replicas are closed.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        restart: Restart | None = None,
        weights: Path | None = None,
        most_running: int = 256,
        limits: Limits | None = None,
        rendezvous: Rendezvous | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        assert replicas
        self._members = [Member(index, replica) for index, replica in enumerate(replicas)]
        self._queue = AdmissionQueue(Router(most_running=most_running))
        self.policy_version = replicas[0].policy_version
        """The version that was published last."""
        target = TargetWeights(path=weights, version=self.policy_version, check=None)
        self._supervisor = ReplicaSupervisor(
            self._members, self._queue, restart, limits or Limits(), target, rendezvous
        )
        self._metrics = PoolMetrics(time.monotonic)
        self._updating = asyncio.Lock()
        self._on_close = on_close
        self._has_begun = False
        self._is_closed = False
        self.context_length: Final = min(replica.context_length for replica in replicas)
        """Maximum tokens of prompt plus completion: the smallest value of all replicas."""
        self.vocab_size: Final = min(replica.vocab_size for replica in replicas)
        """Size of the vocabulary. All ids are below it."""

    # ---- the Sampler protocol

    @property
    def failure(self) -> str | None:
        """Why no replica is left; None while a replica serves or may come back."""
        return self._supervisor.failure

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. If a replica fails, the request is sent to another replica.

        Raises:
            RecordError: the prompt is empty or too long, or an id is outside the vocabulary.
            SamplerFault: no replica is left, or several replicas failed on the request.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)

        async def draw(incarnation: ReplicaIncarnation) -> Completion:
            completion = await incarnation.generate(request)
            # The pool did not cancel this completion, so the server did, for example because it shuts down. Sample it
            # again.
            if completion.stop_reason is StopReason.CANCELLED and not self._is_closed:
                cut = f"it cut a completion off after {len(completion.ids)} tokens"
                raise GivenUp(f"{incarnation.replica.name}: {cut}", len(completion.ids), is_known=True)
            return completion

        try:
            completion, lost = await self._send(request.session, len(request.prompt_ids), draw)
        except _Closing as closing:
            return replace(nothing_sampled(), num_lost_tokens=closing.num_lost_tokens)
        return replace(completion, num_lost_tokens=lost) if lost else completion

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given the tokens before it: float32 [L]; the first is NaN.

        Raises:
            RecordError: there are no ids, an id is outside the vocabulary, or the temperature is not above 0.
            SamplerFault: no replica is left, or several replicas failed on the request.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        check_temperature(temperature)

        async def score(incarnation: ReplicaIncarnation) -> Float32:
            logprobs = await incarnation.ask(incarnation.replica.prompt_logprobs(ids, temperature))
            await incarnation.until_proven(0)
            return logprobs

        return (await self._send("", len(ids), score))[0]

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder on every replica, without a `WeightCheck`. Requests in flight continue."""
        await self.update_replicas(path, version, None)

    async def close(self) -> None:
        """Close the replicas; requests in flight end as cancelled. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.close()  # done first, because requests that lose their replica below must not wait for another one
        await self._supervisor.close()
        if self._on_close is not None:
            await self._on_close()

    # ---- replicas

    async def update_replicas(self, path: Path, version: int, check: WeightCheck | None) -> None:
        """Load a Hugging Face folder on all replicas at the same time, and check each replica.

        Returns once at least one replica serves the version, and every other replica serves it too, is out, or is being
        restarted.

        Raises:
            EngineDead: no replica is left; the message says what happened to each.
        """
        self._begin()
        async with self._updating:
            await self._supervisor.bring_to(TargetWeights(path=path, version=version, check=check))
            self._refuse_if_dead()
            self.policy_version = version

    async def sleep(self) -> None:
        """Make every replica release its device. Requests in flight finish first; later requests wait until the next
        update, which wakes the replicas up.

        Raises:
            EngineDead: no replica is left; the message says what happened to each.
        """
        self._begin()
        async with self._updating:
            await self._supervisor.put_to_sleep()
            self._refuse_if_dead()

    async def check_replicas(self, check: WeightCheck) -> None:
        """Check the replicas' initial weights.

        Raises:
            RunStopped: a replica does not hold these weights; the message names the replica.
            EngineDead: no replica is left.
        """
        self._begin()
        async with self._updating:
            wrong = await self._supervisor.check_first(check)
        if wrong:
            said = "; ".join(f"{name}: {why}" for name, why in wrong.items())
            raise RunStopped(
                f"replicas do not hold policy version {self.policy_version}, with which the run begins. {said}"
            )
        self._refuse_if_dead()

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the pool and of its replicas. Rates cover the time since the last call."""
        return self._metrics.read(self._members, self._queue, self._supervisor.counts)

    def _begin(self) -> None:
        if self._is_closed:
            raise SamplerFault(CLOSED)
        if not self._has_begun:
            self._has_begun = True
            self._supervisor.begin()

    def _refuse_if_dead(self) -> None:
        if self.failure is not None:
            raise EngineDead(self.failure)

    # ---- requests

    async def _send(
        self, session: str, num_prompt_tokens: int, call: Callable[[ReplicaIncarnation], Coroutine[Any, Any, T]]
    ) -> tuple[T, int]:
        """Send a request to a replica and, if that replica fails, to another replica.

        Returns:
            (the call's result, the number of tokens that were sampled for this call and lost).

        Raises:
            SamplerFault: no replica is left, or several replicas failed on the request; the error carries the number of
                lost tokens.
            asyncio.CancelledError: the caller was cancelled; the error carries the number of sampled tokens.
        """
        self._begin()
        counts, avoid = self._supervisor.counts, list[int]()
        lost = num_faults = 0
        why: GivenUp | SamplerFault | None = None
        try:
            for _ in range(MOST_ATTEMPTS):
                place = await self._queue.take(session, num_prompt_tokens, avoid)
                if place is None:
                    raise _Closing(CLOSED) if self._is_closed else SamplerFault(self.failure or CLOSED)
                counts.resent += why is not None
                member = self._members[place.replica]
                incarnation = member.incarnation
                try:
                    result = await call(incarnation)
                except (GivenUp, SamplerFault) as end:
                    why = end
                else:
                    member.num_lost_in_a_row = 0
                    return result, lost
                finally:
                    self._queue.leave(place)
                lost += why.num_tokens
                counts.lost_tokens += why.num_tokens
                counts.unknown += not (why.is_known if isinstance(why, GivenUp) else why.num_tokens)
                avoid.append(member.index)
                # If the incarnation is not over, the server cut the completion off (see `generate`), but the replica is
                # alive.
                if isinstance(why, GivenUp) and not incarnation.over.done():
                    self._supervisor.failed_on_a_request(member, str(why))
                elif isinstance(why, WrongVersions):
                    self._supervisor.distrust(member, incarnation, str(why))
                elif isinstance(why, SamplerFault) and await self._supervisor.is_well(member, incarnation):
                    num_faults += 1
                    self._supervisor.failed_on_a_request(member, str(why))
                    if num_faults == MOST_FAULTS:
                        break
        except asyncio.CancelledError as end:
            raise cancelled(num_tokens_drawn(end), num_lost_tokens=lost) from None
        except SamplerFault as fault:
            fault.num_lost_tokens = lost
            raise
        last = f"the last of {len(avoid)} replicas that {'failed on it' if num_faults else 'were lost with it'}"
        raise SamplerFault(f"{why} ({last})", num_lost_tokens=lost) from why


class _Closing(SamplerFault):
    """The pool was closed while a request waited."""
