"""Compares the episodes per second of `MultiTurnRollout` with those of a lock-step loop that is made of the same parts.

There are 64 episodes of 1 to 8 turns. Each turn samples 32 to 256 tokens, and every turn except the last makes a tool
call. The durations of tools have a long tail (log-normal, median 20 ms, 99th percentile 500 ms), or are 0. The
lock-step loop samples one turn of every live episode as a batch, waits for the longest, and then runs the tools one
after the other.

There are two samplers, both of which are told how many tokens to sample. `scripted` decodes one token of every live
request in each step of 4 ms, however many requests there are, as a GPU does. `embedded` is our own sampler, with a tiny
model on one thread.

Prints one JSON line; rates and ratios are medians over the repetitions. `ratio_over_lock_step` is required to be at
least 2.5, and the same ratio with tools that take no time at least 0.9. `share_of_instant_tools` is our rate divided by
our rate with tools that take no time.
Run: python benchmarks/rollout.py
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from verbatim.core.types import Ids, Int32, Message, StopReason, ToolCall
from verbatim.environments.tools import FunctionTool, ToolManager
from verbatim.inference import Completion, Sampler, SampleRequest, SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import Watch
from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.rollouts import AgentLoop, EpisodeLimits, MultiTurnRollout, Recorder, derive_seed

STEP = 0.004
MEDIAN, P99 = 0.020, 0.500
SIGMA = math.log(P99 / MEDIAN) / 2.3263
MAX_TURNS, CONTEXT, VOCAB = 8, 4096, 512
OPENING, ANSWER = 64, 24


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script of an episode, which does not depend on the sampled tokens."""

    lengths: tuple[int, ...]
    """Number of tokens that each turn samples."""
    latencies: tuple[float, ...]
    """Seconds that the tool takes after each turn except the last."""


def write_scripts(count: int, seed: int, *, instant: bool) -> list[Script]:
    """Draw scripts. For the same seed, the lengths are the same whether or not tools take time (`instant`)."""
    rng = np.random.default_rng(seed)
    scripts = []
    for _ in range(count):
        lengths = tuple(int(n) for n in rng.integers(32, 257, rng.integers(1, MAX_TURNS + 1)))
        latencies = rng.lognormal(math.log(MEDIAN), SIGMA, len(lengths) - 1) * (not instant)
        scripts.append(Script(lengths=lengths, latencies=tuple(latencies)))
    return scripts


class Plan:
    """Finds the script of a turn by its prompt alone: the first id identifies the episode, and the length identifies
    the turn."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._length: dict[tuple[int, int], int] = {}
        self._calls: dict[tuple[int, int], bool] = {}
        for episode, script in enumerate(scripts):
            at = OPENING
            for turn, length in enumerate(script.lengths):
                self._length[episode, at] = length
                self._calls[episode, at] = turn + 1 < len(script.lengths)
                at += length + ANSWER

    def length(self, prompt_ids: Ids) -> int:
        """The number of tokens to sample for this prompt."""
        return self._length[int(prompt_ids[0]), len(prompt_ids)]

    def calls(self, prompt_ids: Ids) -> bool:
        """True if the completion of this prompt calls the tool."""
        return self._calls[int(prompt_ids[0]), len(prompt_ids)]


class PlanRenderer:
    """Renders an opening prompt that consists of the episode's number, parses completions according to the plan, and
    renders all tool answers in the same way."""

    name = "plan"
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def render_ids(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = True) -> Int32:
        return np.full(OPENING, int(messages[0]["content"]), dtype=np.int32)

    def parse_response(self, completion_ids: Ids, prompt_ids: Ids | None = None, tools: Any = None) -> ParsedResponse:
        assert prompt_ids is not None
        call = ToolCall(name="work", arguments={}, status="ok", raw="")
        return ParsedResponse(content="", tool_calls=(call,) if self._plan.calls(prompt_ids) else ())

    def bridge_to_next_turn(self, prompt: Int32, completion: Int32, messages: Any, tools: Any = None) -> Int32 | None:
        return np.concatenate([prompt, completion, np.ones(ANSWER, dtype=np.int32)])

    def decode(self, ids: Ids) -> str:
        return ""


# ---- samplers


class SteppedSampler:
    """A sampler that decodes on a separate thread in the way of a GPU: all live requests advance by one token in each
    step of 4 ms."""

    context_length, vocab_size, policy_version = CONTEXT, VOCAB, 0

    def __init__(self) -> None:
        self.plan = Plan([])
        self._joining: list[tuple[int, asyncio.Future[None]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._decode, daemon=True)
        self._thread.start()

    async def generate(self, request: SampleRequest) -> Completion:
        length = self.plan.length(request.prompt_ids)
        done = asyncio.get_running_loop().create_future()
        with self._changed:
            self._joining.append((length, done))
            self._changed.notify()
        await done
        return Completion(
            ids=np.full(length, 7, dtype=np.int32),
            logprobs=np.full(length, -1.0, dtype=np.float32),
            policy_versions=np.zeros(length, dtype=np.int32),
            stop_reason=StopReason.STOP,
        )

    def _decode(self) -> None:
        live: list[tuple[int, asyncio.Future[None]]] = []
        ends = time.perf_counter()
        while not self._closed:
            with self._changed:
                if not live and not self._joining:
                    self._changed.wait()
                    ends = time.perf_counter()
                live += self._joining
                self._joining.clear()
            ends += STEP
            time.sleep(max(0.0, ends - time.perf_counter()))
            for left, done in live:
                if left == 1:
                    done.get_loop().call_soon_threadsafe(done.set_result, None)
            live = [(left - 1, done) for left, done in live if left > 1]

    async def update_weights(self, path: Path, version: int) -> None:
        raise NotImplementedError

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    async def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


class EmbeddedSampler(TorchSampler):
    """Our own sampler, which samples the number of tokens that the plan says."""

    plan = Plan([])

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        params = dataclasses.replace(request.params, max_tokens=self.plan.length(request.prompt_ids))
        completion = await super().generate(dataclasses.replace(request, params=params), watch)
        return dataclasses.replace(completion, stop_reason=StopReason.STOP)


def tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
        )
    ).save_pretrained(folder)
    return folder


# ---- the two loops


def make_tools(script: Script) -> ToolManager:
    """Make the tool of one episode, which takes the time that the script says."""
    latencies = iter(script.latencies)

    async def work() -> str:
        """Work."""
        seconds = next(latencies)
        if seconds:
            await asyncio.sleep(seconds)
        return "done"

    return ToolManager([FunctionTool(work)])


def opening(index: int) -> list[Message]:
    return [{"role": "user", "content": str(index)}]


async def play_ours(sampler: Sampler, renderer: PlanRenderer, scripts: Sequence[Script]) -> int:
    """Play with `MultiTurnRollout`; returns the number of recorded turns."""
    rollout = MultiTurnRollout(sampler=sampler, template=renderer, max_turns=MAX_TURNS)
    results = await rollout.run(
        [{"messages": opening(index)} for index in range(len(scripts))],
        tool_manager=[make_tools(script) for script in scripts],
    )
    assert all(result.error is None for result in results)
    return sum(len(result.turns) for result in results)


class LockStepEpisode:
    """The state of one episode in the lock-step loop."""

    def __init__(self, sampler: Sampler, renderer: PlanRenderer, script: Script, index: int) -> None:
        self.messages = opening(index)
        self.tools = make_tools(script)
        self.recorder = Recorder(sampler.vocab_size)
        self.loop = AgentLoop(
            sampler=sampler,
            renderer=renderer,
            params=SamplingParams(),
            recorder=self.recorder,
            limits=EpisodeLimits(max_turns=MAX_TURNS, max_context=CONTEXT),
            seed=derive_seed(0, index),
        )

    async def sample(self) -> None:
        self.messages.append(await self.loop.sample(self.messages, tuple(self.tools.values())))


async def play_lock_step(sampler: Sampler, renderer: PlanRenderer, scripts: Sequence[Script]) -> int:
    """Play in lock-step: in each round, all live episodes sample one turn, and then their tools run one after the
    other. Returns the number of recorded turns."""
    episodes = [LockStepEpisode(sampler, renderer, script, index) for index, script in enumerate(scripts)]
    live = episodes
    while live:
        await asyncio.gather(*(episode.sample() for episode in live))
        live = [episode for episode in live if episode.recorder.turns[-1].tool_calls]
        for episode in live:
            for call in episode.recorder.turns[-1].tool_calls:
                episode.messages.append((await episode.tools.dispatch(call, timeout=60.0)).message)
    return sum(len(episode.recorder.turns) for episode in episodes)


# ---- the measurement


async def measure(sampler: Any, episodes: int, repeats: int) -> Mapping[str, Any]:
    """Measure rates and ratios with one sampler. The two loops take turns."""
    rates: dict[str, list[float]] = {}
    warm_up = write_scripts(8, 999, instant=True)
    sampler.plan = Plan(warm_up)
    for play in (play_ours, play_lock_step):
        await play(sampler, PlanRenderer(sampler.plan), warm_up)
    for repeat in range(repeats):
        for instant in (False, True):
            scripts = write_scripts(episodes, repeat, instant=instant)
            sampler.plan = Plan(scripts)
            for name, play in (("multi_turn", play_ours), ("lock_step", play_lock_step)):
                began = time.perf_counter()
                turns = await play(sampler, PlanRenderer(sampler.plan), scripts)
                seconds = time.perf_counter() - began
                assert turns == sum(len(script.lengths) for script in scripts)
                rates.setdefault(name + ("_instant_tools" if instant else ""), []).append(episodes / seconds)
    await sampler.close()

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)

    return {
        "episodes_per_second": {name: round(statistics.median(values), 2) for name, values in rates.items()},
        "ratio_over_lock_step": ratio("multi_turn", "lock_step"),
        "ratio_over_lock_step_with_instant_tools": ratio("multi_turn_instant_tools", "lock_step_instant_tools"),
        "share_of_instant_tools": ratio("multi_turn", "multi_turn_instant_tools"),
    }


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "rollout"}
    result["scripted"] = asyncio.run(measure(SteppedSampler(), args.episodes, args.repeats))
    with tempfile.TemporaryDirectory() as folder:
        config = TorchSettings(device="cpu", max_batch_size=args.episodes)
        sampler = EmbeddedSampler(tiny_model(Path(folder)), config=config, context_length=CONTEXT, num_threads=1)
        result["embedded"] = asyncio.run(measure(sampler, args.episodes, args.repeats))
    result |= {
        "seconds_per_step": STEP,
        "tool_seconds": {"median": MEDIAN, "p99": P99},
        "episodes": args.episodes,
        "repeats": args.repeats,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
