"""Measures what rollouts cost one orchestrator process: processor time per turn, lag of the event loop, and memory per
episode.

Episodes of 8 turns run through the dispatcher, the groups, the rollout engine, tools and the recorder, as in a run. All
episodes are in flight at the same time. The sampler costs nothing, because every completion is prepared. There are
three loads:

- `many`: 10,000 episodes of 2,000 tokens, with a renderer that only copies arrays, so that rendering is not measured.
- `long`: 5,008 episodes of 32,000 tokens, half of which are sampled, with the same renderer. Memory is read when all
  episodes wait for their last completion.
- `guess`: 512 games of guess_number with the demo's tokenizer, and the renderer that is chosen for the demo's template.

Each load runs in a separate process and prints one JSON line: microseconds of processor time per turn, turns per second
of processor time, the delay in milliseconds with which a task that sleeps for 10 ms wakes up (median, 99th percentile,
maximum), and kilobytes of resident memory per episode.

    python benchmarks/orchestrator.py [--load many] [--episodes 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.trajectories import Ledger
from verbatim.core.types import Example, Ids, Int32, Message, StopReason, ToolCall, Trajectory
from verbatim.environments.environment import Episode
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.tools import FunctionTool, ToolManager, ToolResult
from verbatim.inference import Completion, SampleRequest, SamplingParams
from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.run.orchestrator.dispatcher import Dispatcher

GROUP, VOCAB, TURNS = 16, 32_000, 8
END = 7
LAG_EVERY = 0.010


@dataclass(frozen=True, kw_only=True)
class Load:
    """The episodes of one load."""

    episodes: int
    opening: int = 0
    """Number of tokens in the first prompt."""
    sampled: int = 0
    """Number of tokens in a completion."""
    answer: int = 0
    """Number of tokens that a tool's answer adds to the next prompt."""
    holds: bool = False
    """True if every episode waits with its last completion until all episodes have come that far."""


LOADS = {
    "many": Load(episodes=10_000, opening=400, sampled=120, answer=91),
    "long": Load(episodes=5_008, opening=1_000, sampled=2_000, answer=2_143, holds=True),
    "guess": Load(episodes=512),
}


# ---- the plain loads, in which only the lengths of prompts and completions are realistic


class PlainRenderer:
    """Renders arrays of the load's lengths, and parses every completion as a tool call."""

    name = "plain"
    stop_token_ids: tuple[int, ...] = (END,)

    def __init__(self, load: Load) -> None:
        self._opening = np.arange(100, 100 + load.opening, dtype=np.int32) % VOCAB
        self._answer = np.arange(200, 200 + load.answer, dtype=np.int32) % VOCAB
        self._call = ToolCall(name="look", arguments={"place": "Bonn"}, status="ok", raw='{"name": "look"}')

    def render_ids(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = True) -> Int32:
        return self._opening.copy()

    def parse_response(self, completion_ids: Ids, prompt_ids: Ids | None = None, tools: Any = None) -> ParsedResponse:
        return ParsedResponse(content="", tool_calls=(self._call,))

    def bridge_to_next_turn(self, prompt: Int32, completion: Int32, messages: Any, tools: Any = None) -> Int32 | None:
        return np.concatenate([prompt, completion, self._answer])

    def decode(self, ids: Ids) -> str:
        return ""


class LookEpisode(Episode):
    """An episode that ends after `TURNS` calls of the tool `look`."""

    def __init__(self) -> None:
        self._left = TURNS
        self.messages = [{"role": "system", "content": "You look."}, {"role": "user", "content": "Look around."}]
        self.tools = ToolManager([FunctionTool(self.look, inline=True)])

    def look(self, place: str) -> ToolResult:
        """Look at a place.

        Args:
            place: Its name.
        """
        self._left -= 1
        return ToolResult(content="nothing", done=not self._left)

    async def score(self, trajectory: Trajectory) -> float:
        return float(not self._left)

    def state_key(self) -> str:
        return f"{self._left} left"


class LookAround:
    """An environment whose episodes have `TURNS` turns, each with a tool call."""

    def examples(self, split: str) -> Sequence[Example]:
        return [Example(id=str(i)) for i in range(1000)]

    async def start(self, example: Example, seed: int) -> Episode:
        return LookEpisode()


class ReadySampler:
    """A sampler with prepared completions. Before it returns a completion, it lets other tasks run."""

    context_length, vocab_size, policy_version = 65_536, VOCAB, 0

    def __init__(self, complete: Callable[[SampleRequest], Int32], load: Load) -> None:
        self._complete, self._load = complete, load
        self._last_prompt = load.opening + (TURNS - 1) * (load.sampled + load.answer)
        self._waiting, self._go_on = 0, asyncio.Event()
        self.num_turns, self.resident = 0, 0

    async def generate(self, request: SampleRequest) -> Completion:
        self.num_turns += 1
        if self._load.holds and len(request.prompt_ids) == self._last_prompt:
            self._waiting += 1
            if self._waiting == self._load.episodes:
                self.resident = resident()
                self._go_on.set()
            await self._go_on.wait()
        await asyncio.sleep(0)
        ids = self._complete(request)
        count = len(ids)
        return Completion(
            ids=ids,
            logprobs=np.full(count, -1.0, dtype=np.float32),
            policy_versions=np.zeros(count, dtype=np.int32),
            stop_reason=StopReason.STOP,
        )


# ---- the games, rendered and parsed as in a run


class GuessScript:
    """Completions that guess the numbers 1 to 15, in the tokens of the demo's model."""

    def __init__(self, encode: Callable[[str], list[int]], end: int) -> None:
        self._completions = [
            np.array(
                [*encode(f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'), end],
                dtype=np.int32,
            )
            for number in range(1, 16)
        ]

    def __call__(self, request: SampleRequest) -> Int32:
        return self._completions[request.seed % 15].copy()


def guess_setup(load: Load) -> tuple[Any, Any, ReadySampler]:
    """Make the environment, the renderer and the sampler of a load."""
    from verbatim.models.renderers import create_renderer
    from verbatim.models.trained_tokenizer import END_OF_TURN, build_tokenizer, chat_text

    environment = GuessNumber()
    texts = [chat_text(shown.messages, shown.tools) for shown in environment.demonstrations(200, 0)]
    tokenizer = build_tokenizer(texts, vocab_size=512, context_length=1024)
    renderer = create_renderer("auto", tokenizer)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return environment, renderer, ReadySampler(GuessScript(tokenizer.encode, end), load)


def plain_setup(load: Load) -> tuple[Any, Any, ReadySampler]:
    """Make the environment, the renderer and the sampler of a load."""
    completion = np.full(load.sampled, 11, dtype=np.int32)
    completion[-1] = END
    return LookAround(), PlainRenderer(load), ReadySampler(lambda request: completion.copy(), load)


# ---- the measurement


def resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def note_lag(lags: list[float]) -> None:
    """Record by how many seconds each sleep of 10 ms ends too late."""
    while True:
        due = time.monotonic() + LAG_EVERY
        await asyncio.sleep(LAG_EVERY)
        lags.append(time.monotonic() - due)


async def play(name: str, load: Load) -> Mapping[str, Any]:
    """Play all episodes of a load as one batch, concurrently; returns the figures."""
    environment, renderer, sampler = (guess_setup if name == "guess" else plain_setup)(load)
    setup = RolloutSetup(
        env=name,
        environment=environment,
        sampler=sampler,
        renderer=renderer,
        params=SamplingParams(max_tokens=4096),
        limits=EpisodeLimits(max_turns=16, max_context=65_536),
        slots=asyncio.Semaphore(load.episodes),
    )
    ledger = Ledger()
    dispatcher = Dispatcher(
        schedule=ExampleSchedule({name: environment.examples("train")}, {name: 1.0}, seed=0),
        setups={name: setup},
        ledger=ledger,
        group_size=GROUP,
        groups_per_batch=load.episodes // GROUP,
        max_async_level=0,
        max_off_policy_steps=8,
        oversampling_factor=1.0,
        run_seed=0,
        max_steps=1,
    )
    lags: list[float] = []
    lag = asyncio.create_task(note_lag(lags))
    await asyncio.sleep(0.05)
    lags.clear()
    stack = contextlib.ExitStack()
    with contextlib.suppress(ImportError):  # an older version of Verbatim lacks this module
        from verbatim.run.orchestrator.gc_policy import seldom_collected, spot_checks

        stack.enter_context(seldom_collected())
        stack.callback(asyncio.create_task(spot_checks()).cancel)
    before, began, wall = resident(), time.process_time(), time.perf_counter()
    dispatcher.start(0, 0)
    groups = await dispatcher.next_batch()
    seconds, wall = time.process_time() - began, time.perf_counter() - wall
    lag.cancel()
    stack.close()
    assert groups is not None
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert all(trajectory.error is None for trajectory in trajectories), trajectories[0].error
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    assert turns == sampler.num_turns
    late = np.percentile(lags, (50, 99, 100)) * 1000
    return {
        "load": name,
        "episodes": len(trajectories),
        "turns": turns,
        "tokens_of_an_episode": trajectories[0].turns[-1].path.length,
        "microseconds_a_turn": round(1e6 * seconds / turns, 1),
        "turns_a_second": round(turns / seconds),
        "lag_ms": dict(zip(("median", "p99", "most"), (round(float(value), 1) for value in late), strict=True)),
        "kilobytes_an_episode": round((sampler.resident - before) / len(trajectories) / 1000) if load.holds else None,
        "wall_seconds": round(wall, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, help="one of them, in this process")
    parser.add_argument("--episodes", type=int)
    args = parser.parse_args()
    if args.load is None:
        for name in LOADS:
            subprocess.run([sys.executable, __file__, "--load", name], check=True)
        return
    load = LOADS[args.load]
    if args.episodes:
        load = dataclasses.replace(load, episodes=-(-args.episodes // GROUP) * GROUP)
    print(json.dumps({"benchmark": "orchestrator", **asyncio.run(play(args.load, load))}))


if __name__ == "__main__":
    main()
