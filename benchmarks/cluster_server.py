"""Defines a simulated inference server, which batches continuously, caches prefixes, loads weights, fails and dies."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from cluster_workload import CALLS, CONTEXT, ENDS, FILL, SCALE, VOCAB, stand_in
from cluster_world import World
from verbatim.core.errors import SamplerFault
from verbatim.core.types import Float32, Int32, StopReason
from verbatim.inference.cancelled import cancelled
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest


class _Running:
    """A request in a server's batch or queue."""

    __slots__ = ("begin", "done", "end", "is_over", "length", "session")

    def __init__(self, done: asyncio.Future[None], session: str, length: int) -> None:
        self.done, self.session, self.length, self.is_over = done, session, length, False
        self.begin = self.end = 0.0


class Server:
    """A simulated server: a `Replica` that batches continuously, as vLLM does.

    All requests in its batch advance by one token per decode step. `_work` counts the steps; a request ends once the
    number of steps since its beginning equals its number of tokens.
    """

    def __init__(self, world: World, index: int, version: int = 0) -> None:
        self._world, self._loop, self.index = world, world.loop, index
        self.name, self.num_unverified, self.policy_version = f"server-{index}", 0, version
        self.context_length, self.vocab_size = CONTEXT, VOCAB
        faults = world.faults
        is_slow = (index * 7919) % 1000 < 1000 * faults.slow_share and index
        self._slower = faults.slow_factor if is_slow else 1.0
        self._batch: list[tuple[float, int, _Running]] = []
        self._waiting: list[_Running] = []
        self._order = itertools.count()
        self._num = 0
        self._work = self._stall = 0.0
        self._at = self._loop.time()
        self._stamp = 0
        self._paused = self.is_dead = False
        self._cache: OrderedDict[str, int] = OrderedDict()
        self._cached = 0
        self._marks: list[tuple[float, int]] = []
        self.generated = self.queries = self.hits = 0
        if faults.seconds_between:
            self._loop.at(self._at + world.rng.exponential(faults.seconds_between), self._die)

    # ---- the Replica protocol

    async def generate(self, request: SampleRequest) -> Completion:
        world, loop = self._world, self._loop
        with loop.uncharged:
            world.send("generate")
            self._refuse_if_dead()
            script = world.scripts[int(request.session.partition("/")[0])]
            length, is_last = script.length, script.is_last
            running = _Running(loop.create_future(), request.session, length)
            self._join(running, script.context)
        try:
            await running.done
        except asyncio.CancelledError:
            with loop.uncharged:
                raise cancelled(self._tell(round(self._leave(running) / SCALE))) from None
        with loop.uncharged:
            if world.rng.random() < world.faults.request:
                raise SamplerFault(f"{self.name}: 500", num_tokens=self._tell(stand_in(length)))
            return self._completion(running, is_last)

    async def update_weights(self, path: Path, version: int) -> None:
        world, loop = self._world, self._loop
        for kind in ("pause", "load", "resume"):
            world.send(kind)
        self._refuse_if_dead()
        with loop.uncharged:
            self._advance()
            self._paused = True
            self._reschedule()
            seconds = world.rng.lognormal(math.log(world.faults.update), 0.3) * self._slower
        await loop.sleep(seconds)
        with loop.uncharged:
            self._refuse_if_dead()
            self._advance()
            self._cache.clear()
            self._cached = 0
            self._marks.append((self._work, self.policy_version))
            self.policy_version = version
            self._paused = False
            self._reschedule()

    async def health(self) -> None:
        self._world.send("health")
        await self._loop.sleep(0.002)
        self._refuse_if_dead()

    async def load_metrics(self) -> ReplicaLoad:
        self._world.send("load_metrics")
        await self._loop.sleep(0.002)
        self._refuse_if_dead()
        with self._loop.uncharged:
            self._advance()
            return ReplicaLoad(
                running=self._num,
                waiting=len(self._waiting),
                cache_queries=self.queries,
                cache_hits=self.hits,
                generated_tokens=int(self.generated),
                kv_usage=min(1.0, self._cached / self._world.curve.cache),
            )

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        self._world.send("prompt_logprobs")
        await self._loop.sleep(0.02)
        self._refuse_if_dead()
        return self._world.logprobs_of(token_ids, self.policy_version)

    async def cached_logprob(self, token_ids: Int32) -> float:
        return float((await self.prompt_logprobs(token_ids))[-1])

    async def close(self) -> None:
        pass

    # ---- the batch

    def _step(self) -> float:
        curve = self._world.curve
        return (curve.step + curve.step_per_request * self._num) * self._slower

    def _advance(self) -> None:
        """Advance the batch to the current time."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        if self._paused or not self._num or passed <= 0:
            return
        self._world.busy += passed
        stalled = min(passed, self._stall)
        self._stall -= stalled
        steps = (passed - stalled) / self._step()
        self._work += steps
        self.generated += steps * self._num

    def _reschedule(self) -> None:
        self._stamp += 1
        while self._batch and self._batch[0][2].is_over:
            heapq.heappop(self._batch)
        if self._batch and not self._paused and not self.is_dead:
            seconds = self._stall + max(0.0, self._batch[0][0] - self._work) * self._step()
            self._loop.at(self._at + seconds, self._tick, self._stamp)

    def _tick(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        self._advance()
        while self._batch and (self._batch[0][2].is_over or self._batch[0][0] <= self._work + 1e-6):
            running = heapq.heappop(self._batch)[2]
            if not running.is_over:
                self._end(running)
                if not running.done.done():
                    running.done.set_result(None)
        self._reschedule()

    def _join(self, running: _Running, context: int) -> None:
        self._advance()
        known = self._cache.pop(running.session, 0)
        self._cached -= known
        self.queries += context
        self.hits += min(known, context)
        self._stall += max(0, context - known) / self._world.curve.prefill * self._slower
        self._cache[running.session] = context + running.length
        self._cached += context + running.length
        while self._cached > self._world.curve.cache and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1]
        if self._num < self._world.curve.most_running:
            self._begin(running)
        else:
            self._waiting.append(running)
        self._reschedule()

    def _begin(self, running: _Running) -> None:
        self._num += 1
        running.begin, running.end = self._work, self._work + running.length
        heapq.heappush(self._batch, (running.end, next(self._order), running))

    def _end(self, running: _Running) -> None:
        running.is_over = True
        self._num -= 1
        if self._waiting:
            self._begin(self._waiting.pop(0))
        if not self._num:
            self._stall = 0.0

    def _leave(self, running: _Running) -> float:
        """Remove a request that was cut off; returns the number of tokens that it had sampled."""
        if running.is_over or self.is_dead:
            return 0.0
        self._advance()
        if running.end == 0.0:
            self._waiting.remove(running)
            return 0.0
        drawn = min(running.length, self._work - running.begin)
        self._end(running)
        self._reschedule()
        return drawn

    def _completion(self, running: _Running, is_last: bool) -> Completion:
        world = self._world
        num = self._tell(stand_in(running.length))
        ids = np.full(num, FILL, dtype=np.int32)
        ids[-1] = ENDS if is_last else CALLS
        versions = np.full(num, self.policy_version, dtype=np.int32)
        for work, before in reversed(self._marks):
            if work <= running.begin:
                break
            versions[: int((work - running.begin) / running.length * num)] = before
        world.drawn += running.length
        world.stood_in += num
        world.turns += 1
        return Completion(
            ids=ids,
            logprobs=np.full(num, -1.0, dtype=np.float32),
            policy_versions=versions,
            stop_reason=StopReason.STOP,
        )

    def _tell(self, num: int) -> int:
        self._world.told += num
        return num

    # ---- the end of a server

    def _refuse_if_dead(self) -> None:
        if self.is_dead:
            raise SamplerFault(f"{self.name}: connection refused")

    def _die(self, _: Any) -> None:
        if self.is_dead:
            return
        self._advance()
        self.is_dead = True
        self._world.num_deaths += 1
        fault = SamplerFault(f"{self.name}: the connection broke")
        for request in [*(entry[2] for entry in self._batch), *self._waiting]:
            if not request.done.done():
                request.done.set_exception(fault)
        self._batch, self._waiting, self._num = [], [], 0
