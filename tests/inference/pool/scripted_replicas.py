"""Replicas without a server: they sample from a script, die, freeze, and load weights well or badly."""

import asyncio
import itertools

import numpy as np

from verbatim.core.errors import ModelError, SamplerFault
from verbatim.core.types import StopReason
from verbatim.inference import Completion, SampleRequest, SamplingParams
from verbatim.inference.cancelled import cancelled
from verbatim.inference.pool.loading import Limits
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.pool.replica import ReplicaLoad, TooSlow
from verbatim.inference.scripted import ScriptedSampler
from waiting import HANGS

VOCAB = 100
LIMITS = Limits(health_interval=0.01, health=0.05, silence=0.1, stall=HANGS, update=HANGS, check=HANGS, start=HANGS)
"""A replica that lives answers a health check at once, without a turn of the event loop: only a frozen one is late. A
test that needs another limit sets it, and what it cuts off never ends."""


async def settled():
    """Let all be done that waits for no clock: as many turns of the event loop as that can need."""
    for _ in range(100):
        await asyncio.sleep(0)


def request(session="", *, prompt=(1, 2, 3), tokens=4, seed=0):
    params = SamplingParams(max_tokens=tokens)
    return SampleRequest(prompt_ids=np.array(prompt, np.int32), params=params, seed=seed, session=session)


def after(tokens, event):
    """A `pause` of a replica that draws so many tokens, and the others once the event is set."""
    calls = itertools.count()

    async def pause(seconds):
        await asyncio.sleep(0)
        if next(calls) >= tokens:
            await event.wait()

    return pause


def logprob_of(token, version):
    """The logprob of a token under the weights of a version."""
    return -1.0 / (1 + token) - 0.01 * version


class ScriptedReplica(ScriptedSampler):
    """Computes with the weights of version `held`, whatever it says. By default it says one token again and again.

    Args:
        faults: What goes wrong with a load, one for each load; "" loads well: "stale" keeps the weights, "label" the
            version, "cache" the prefix cache; "refused" cannot load, "gone" finds no file, "slow" never ends,
            "mismatch" finds wrong digests and stays paused, "dies" dies.
        reports: Whether a request that is cut off says how many tokens were drawn.
    """

    def __init__(self, index=0, *, faults=(), version=0, reports=True, **arguments):
        ours = {"script": lambda r: [7] * r.params.max_tokens, "vocab_size": VOCAB, "context_length": 200}
        super().__init__(policy_version=version, **(ours | arguments))
        self.index, self.faults, self.reports = index, list(faults), reports
        self.held, self.is_dead, self.is_frozen, self.is_closed, self.is_stalled = version, False, False, False, False
        self.is_paused = False
        self.events, self.gate, self.fails, self.cache = [], None, 0, {}
        self.is_asleep, self.seconds_waking, self.at_sleep = False, None, []
        self.logprob = lambda token: logprob_of(token, self.held)
        self._hung: list[asyncio.Future[None]] = []
        self.num_unverified = 0

    @property
    def name(self):
        return f"replica {self.index}"

    def die(self):
        """As a killed server: connections break, and no other is taken."""
        self.is_dead = True
        for hung in self._hung:
            if not hung.done():
                hung.set_exception(SamplerFault(f"{self.name}: the connection broke"))

    def freeze(self):
        """As a stopped process: nothing comes back."""
        self.is_frozen = True

    async def sleep(self):
        """Nothing may be in flight. `at_sleep` is what goes wrong, one for each sleep."""
        await self.until_reached()
        assert self.num_in_flight == 0
        self.events.append("sleep")
        fault = self.at_sleep.pop(0) if self.at_sleep else ""
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "fails":
            raise SamplerFault(f"{self.name}: sleep: 500")
        self.is_asleep, self.seconds_waking, self.cache = True, 0.0, {}

    def assert_awake(self):
        assert not self.is_asleep, "it was asked while it slept"

    async def until_reached(self):
        """As a call that comes over the network."""
        if self.is_dead:
            raise SamplerFault(f"{self.name}: connection refused")
        if self.is_frozen:
            await asyncio.Event().wait()

    async def health(self):
        await self.until_reached()

    async def load_metrics(self):
        await self.until_reached()
        return ReplicaLoad(
            running=self.num_in_flight,
            waiting=0,
            kv_usage=0.25,
            cache_queries=3 * len(self.requests),
            cache_hits=2 * len(self.requests),
            generated_tokens=self.num_drawn,
        )

    async def generate(self, request):
        await self.until_reached()
        self.assert_awake()
        if self.fails:
            self.fails -= 1
            raise SamplerFault(f"{self.name}: 500")
        drawing = asyncio.ensure_future(super().generate(request))
        hung = asyncio.get_running_loop().create_future()
        self._hung.append(hung)
        try:
            await asyncio.wait({drawing, hung}, return_when=asyncio.FIRST_COMPLETED)
            if hung.done():
                drawing.cancel()
                hung.result()
            if self.is_frozen or self.is_stalled:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            drawing.cancel()
            await asyncio.wait({drawing})
            if not self.reports:
                raise
            try:
                drawn = len(drawing.result().ids)
            except asyncio.CancelledError as end:
                drawn = end.num_tokens
            raise cancelled(drawn) from None
        finally:
            self._hung.remove(hung)
        return drawing.result()

    async def _answer(self, index, request, versions, watch):
        """Each token has the logprob of the weights that drew it."""
        ids, reason = self._cut(self._look_up(index, request), request)
        logprobs = []
        for token in ids:
            await self.pause(self.seconds_per_token)
            if self._closed.is_set():
                reason = StopReason.CANCELLED
                break
            versions.append(self.policy_version)
            logprobs.append(self.logprob(int(token)))
            self.num_drawn += 1
        return Completion(
            ids=ids[: len(versions)],
            logprobs=np.array(logprobs, np.float32),
            stop_reason=reason,
            policy_versions=np.array(versions, np.int32),
        )

    async def update_weights(self, path, version):
        await self.until_reached()
        self.events.append(f"load {version}")
        if self.is_asleep:
            self.is_asleep, self.seconds_waking = False, 0.25
        fault = self.faults.pop(0) if self.faults else ""
        if self.gate is not None:
            await self.gate.wait()
        if fault == "refused":
            raise ModelError(f"{path} has no tensor 'lm_head.weight'")
        if fault == "gone":
            raise FileNotFoundError(f"{path}/model.safetensors")
        if fault == "slow":
            await asyncio.Event().wait()
        if fault == "too slow":
            raise TooSlow(f"{self.name}: pausing it took more than 120 s")
        if fault == "dies":
            self.die()
            await self.until_reached()
        if fault != "stale":
            self.held = version
        if fault != "cache":
            self.cache = {}
        self.is_paused = fault == "mismatch"
        if self.is_paused:
            raise SamplerFault(f"{self.name}: 1 tensor is not the published one: model.norm.weight")
        if fault != "label":
            self.policy_version = version

    async def prompt_logprobs(self, token_ids, temperature=1.0):
        await self.until_reached()
        self.assert_awake()
        return await super().prompt_logprobs(token_ids, temperature)

    async def cached_logprob(self, token_ids):
        """The beginning of a prompt keeps the version that computed it first."""
        await self.until_reached()
        self.assert_awake()
        writer = self.cache.setdefault(tuple(token_ids[:4]), self.held)
        return logprob_of(int(token_ids[-1]), writer)

    async def close(self):
        self.is_closed = True
        await super().close()


class ScriptedCheck:
    """Knows what a replica holds. `gate` keeps its verdict back; `verdicts` are by replica."""

    def __init__(self, version):
        self.version, self.gate, self.asked = version, None, []

    async def prepare(self, sampler):
        await sampler.until_reached()
        sampler.assert_awake()
        if sampler.is_paused:
            await asyncio.Event().wait()
        sampler.events.append(f"prepare {self.version}")

    async def __call__(self, sampler):
        await sampler.until_reached()
        sampler.events.append(f"check {self.version}")
        self.asked.append(sampler.name)
        if self.gate is not None:
            await self.gate.wait()
        if sampler.held != self.version:
            return f"its logprobs are those of version {sampler.held}"
        return None


class Restarts:
    """Starts replicas again: `made` are the new ones. The first `failing` starts fail."""

    def __init__(self, *, failing=0, hangs=False, **arguments):
        self.made, self.failing, self.hangs, self.arguments, self.asked = [], failing, hangs, arguments, []

    async def __call__(self, index):
        self.asked.append(index)
        if self.hangs:
            await asyncio.Event().wait()
        if self.failing:
            self.failing -= 1
            raise SamplerFault(f"replica {index}: the server ended with status 1")
        await asyncio.sleep(0)
        replica = ScriptedReplica(index, **self.arguments)
        self.made.append(replica)
        return replica


def pool_of(*replicas, **arguments):
    return ReplicaPool(replicas, **{"limits": LIMITS, **arguments})
