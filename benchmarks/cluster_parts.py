"""What `cluster.py` simulates: servers, tools, a trainer, and the lengths that episodes have. None of it is measured.

A turn is simulated with the length that was drawn for it; the ids that travel are a stand-in, `SCALE` times shorter,
because what a token costs the orchestrator is measured elsewhere and here only the number of turns matters.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster_clock import VirtualLoop, running
from verbatim.environments.base import Episode
from verbatim.errors import SamplerFault
from verbatim.inference.base import Completion, SampleRequest
from verbatim.inference.cut_off import cut_off
from verbatim.inference.pool.base import ReplicaLoad
from verbatim.renderers.base import ParsedResponse
from verbatim.tools.base import ToolResult
from verbatim.transport import StepReport
from verbatim.transport.canary import Probes, probe_sequences
from verbatim.types import Example, Float32, Ids, Int32, Message, StopReason, ToolCall, TrainingSample

SCALE = 32
VOCAB, CONTEXT = 32_000, 32_768
CALLS, ENDS, FILL = 1, 2, 7
"""Last ids of a completion with a tool call, and without; all other ids."""
TABLE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How fast a server is. A decode step draws one token for each request in its batch."""

    step: float = 0.008
    """Seconds of a decode step, and..."""
    step_per_request: float = 0.0001
    """...for each request in the batch."""
    prefill: float = 30_000.0
    """Prompt tokens computed in a second; decoding stands still meanwhile."""
    cache: int = 850_000
    """Tokens that the prefix cache holds, of running and waiting episodes together."""
    most_running: int = 256
    """Requests in a batch; others wait."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What episodes are like. Lengths and times are log-normal."""

    turns: tuple[int, int] = (2, 6)
    """Fewest and most turns of an episode."""
    opening: int = 800
    answer: int = 200
    """Tokens of the opening messages, and of a tool's answer."""
    completion: float = 1200.0
    completion_sigma: float = 0.7
    """Median tokens of a turn; the mean is exp(sigma^2 / 2) times as much."""
    tool: float = 2.0
    tool_p99: float = 45.0
    """Seconds that a tool takes: median and 99th percentile."""
    tool_timeout: float = 60.0
    fails: float = 0.001
    """Share of episodes whose environment raises."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong with servers."""

    seconds_between: float = 20_000.0
    """Mean seconds between two deaths of one server; 0 = none dies."""
    restart: float = 180.0
    """Seconds until a dead server answers again."""
    request: float = 1e-4
    """Share of requests that fail on a server that lives."""
    slow_share: float = 0.02
    slow_factor: float = 1.5
    """Share of the servers that are slower, and how many times slower."""
    update: float = 2.0
    """Median seconds for which an update pauses a server (log-normal, sigma 0.3)."""


NO_FAULTS = Faults(seconds_between=0.0, request=0.0, slow_share=0.0)


class Tables:
    """Draws that are made once, so that an episode's lengths cost nothing."""

    def __init__(self, work: Workload, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sigma = math.log(work.tool_p99 / work.tool) / 2.3263
        draws = rng.lognormal(math.log(work.completion), work.completion_sigma, TABLE)
        self.completions = np.clip(draws, 64, 8192).astype(int).tolist()
        self.tools = rng.lognormal(math.log(work.tool), sigma, TABLE).tolist()
        self.turns = rng.integers(work.turns[0], work.turns[1] + 1, TABLE).tolist()
        self.work = work


class Script:
    """One episode: what its turns will be."""

    __slots__ = ("_first", "_tables", "context", "fails", "num_turns", "turn")

    def __init__(self, tables: Tables, seed: int) -> None:
        self._tables, self._first = tables, (seed * 2_654_435_761) % (TABLE << 8)
        self.num_turns = tables.turns[self._first % TABLE]
        self.fails = (self._first >> 3) % 100_003 < tables.work.fails * 100_003
        self.turn = 0
        self.context = tables.work.opening
        """Tokens of the prompt of this turn."""

    @property
    def length(self) -> int:
        """Tokens that this turn samples."""
        length: int = self._tables.completions[(self._first + 31 * self.turn) % TABLE]
        return length

    @property
    def is_last(self) -> bool:
        """Whether nothing follows this turn."""
        return self.turn + 1 >= self.num_turns

    @property
    def tool_seconds(self) -> float:
        """What the tool takes after this turn."""
        seconds: float = self._tables.tools[(self._first + 17 * self.turn) % TABLE]
        return seconds

    def go_on(self) -> None:
        """The tool has answered."""
        self.context += self.length + self._tables.work.answer
        self.turn += 1


def stand_in(num_tokens: float) -> int:
    """How many ids travel for so many tokens."""
    return max(2, round(num_tokens / SCALE))


@dataclass(eq=False)
class World:
    """What the simulated parts share."""

    loop: VirtualLoop
    curve: Curve
    work: Workload
    faults: Faults
    wire: Mapping[str, float]
    """Processor seconds of a message, by kind, for the orchestrator."""
    seed: int = 0
    scripts: dict[int, Script] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    drawn: float = 0.0
    """Simulated tokens of completions that were delivered."""
    stood_in: int = 0
    """Ids of the same."""
    told: int = 0
    """Ids that servers said they had drawn, whatever became of them."""
    turns: int = 0
    episodes: int = 0
    num_deaths: int = 0
    busy: float = 0.0
    """Seconds in which servers had a request in their batch, summed over the servers."""

    def __post_init__(self) -> None:
        self.tables = Tables(self.work, self.seed)
        self.rng = np.random.default_rng(self.seed + 1)
        self.probes = probe_sequences(VOCAB, CONTEXT)

    def send(self, kind: str) -> None:
        """A message to a server and its answer."""
        self.messages[kind] = self.messages.get(kind, 0) + 1
        if (seconds := self.wire.get(kind, 0.0)) > 0:
            self.loop.spend(seconds)

    def logprobs_of(self, ids: Int32, version: int) -> Float32:
        """Logprobs of a probe under a version: float32 [L]; the first is NaN."""
        found = np.full(len(ids), -1.0 - 0.01 * version, dtype=np.float32)
        found[0] = np.nan
        return found

    def published(self, version: int) -> Probes:
        """What the trainer publishes with a version."""
        logprobs = tuple(self.logprobs_of(ids, version)[1:] for ids in self.probes)
        return Probes(token_ids=self.probes, logprobs=logprobs)


class _Running:
    """A request in a server's batch."""

    __slots__ = ("begin", "done", "end", "is_over", "length", "session")

    def __init__(self, done: asyncio.Future[None], session: str, length: int) -> None:
        self.done, self.session, self.length, self.is_over = done, session, length, False
        self.begin = self.end = 0.0


class Server:
    """A simulated server: a `Replica` that batches continuously, as vLLM does.

    All requests in its batch advance by one token in a step, so `_work` counts steps, and a request ends when as many
    have passed as it has tokens.
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
                raise cut_off(self._tell(round(self._leave(running) / SCALE))) from None
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
                running=self._num, waiting=len(self._waiting), cache_queries=self.queries, cache_hits=self.hits,
                generated_tokens=int(self.generated), kv_usage=min(1.0, self._cached / self._world.curve.cache),
            )  # fmt: skip

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
        """Bring the batch to now."""
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
        """A request is cut off; the tokens that it had."""
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
            ids=ids, logprobs=np.full(num, -1.0, dtype=np.float32), policy_versions=versions,
            stop_reason=StopReason.STOP,
        )  # fmt: skip

    def _tell(self, num: int) -> int:
        self._world.told += num
        return num

    # ---- its end

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


# ---- episodes


class SimulatedTool:
    """A tool whose answer takes a while."""

    name = "work"
    schema: Mapping[str, Any] = {"type": "function", "function": {
        "name": "work", "description": "Work.", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip

    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            await self._world.loop.sleep(self._script.tool_seconds)
        finally:
            self._script.go_on()
        return ToolResult(content="done")


class Errand(Episode):
    """An episode with one tool."""

    messages = ({"role": "user", "content": "run the errand"},)

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self._script = world.scripts[seed] = Script(world.tables, seed)
        self.tools = (SimulatedTool(world, self._script),)

    async def score(self, trajectory: Any) -> float:
        if self._script.fails:
            raise RuntimeError("the errand could not be scored")
        return float(self._seed % 2)

    async def close(self) -> None:
        del self._world.scripts[self._seed]
        self._world.episodes += 1


class Errands:
    """The environment."""

    def __init__(self, world: World, num_examples: int = 4096) -> None:
        self._world = world
        self._examples = [Example(id=f"e{index}") for index in range(num_examples)]

    def examples(self, split: str) -> Sequence[Example]:
        return self._examples

    async def start(self, example: Example, seed: int) -> Errand:
        with self._world.loop.uncharged:
            return Errand(self._world, seed)


class StandInRenderer:
    """Renders by lengths alone; what rendering costs is measured elsewhere."""

    name = "stand-in"
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, work: Workload) -> None:
        self._opening = np.full(stand_in(work.opening), FILL, dtype=np.int32)
        self._answer = np.full(stand_in(work.answer), FILL, dtype=np.int32)

    def render_ids(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = True) -> Int32:
        return self._opening

    def parse_response(self, completion_ids: Ids, prompt_ids: Ids | None = None, tools: Any = None) -> ParsedResponse:
        calls = (ToolCall(name="work", arguments={}, status="ok", raw=""),) if completion_ids[-1] == CALLS else ()
        return ParsedResponse(content="", tool_calls=calls)

    def bridge_to_next_turn(self, prompt: Int32, completion: Int32, messages: Any, tools: Any = None) -> Int32 | None:
        return np.concatenate([prompt, completion, self._answer])

    def decode(self, ids: Ids) -> str:
        return ""


# ---- the trainer


class SimulatedTrainer:
    """Takes a fixed time for a token, one batch after the other.

    Args:
        world: What is simulated.
        seconds: Of a step.
    """

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds, self._turn = world, seconds, asyncio.Lock()

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        async with self._turn:
            await running().sleep(self._seconds)
        return StepReport(
            version=version, weights=Path("weights"), metrics={"loss": 0.0}, probes=self._world.published(version),
            num_trained_tokens=sum(sample.num_trained_tokens for sample in samples),
        )  # fmt: skip

    async def save(self, folder: Path, version: int) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass
