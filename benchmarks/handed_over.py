"""Measures the processor time of each part of the way from finished episodes to a batch that is handed to the trainer
and logged.

Episodes have 32 turns, each with 256 sampled tokens and 256 tokens of a tool's answer. They are in groups of 16, and
their messages have about as many words as the tokens need. The parts, in the order of a step:

- `credit`, `filters`, `samples`: the parts of `assemble_group`, with the default filters of a run.
- `order`: writing the message to the trainer into a file of the exchange. `read` is the trainer's side: reading the
  message, and every array of every sample.
- `metrics`: computing the metrics of the rollouts.
- `report`: adding the trainer's logprob and derivative of each trained token to the outcomes.
- `log`: writing the outcome file of the step.

Processor time is that of this process, with all its threads, and of the processes that it started. `total` does not
include `read`. `longest_hold` is the longest time in seconds for which a thread that wakes up each millisecond could
not run, that is, for which an event loop would have been blocked. It is longer on a busy machine.

Prints one JSON line. Run: python benchmarks/handed_over.py [--short]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verbatim import Trajectory, TurnTiming
from verbatim.algorithms.credit import ADVANTAGES, assign_advantages
from verbatim.algorithms.filters import FILTERS, apply_filters
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import Group
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.rollouts import Recorder
from verbatim.run.orchestrator.assemble import AssembledGroup, GroupRules, assemble_group, rollout_metrics
from verbatim.run.orchestrator.step_metrics import _with_tokens
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.trainer_messages import TrainerMessage

T = TypeVar("T")
GROUP, TURN, SAMPLED, VOCAB = 16, 512, 256, 151_936
WORDS = Path(__file__).parents[1].joinpath("docs", "trajectories.md").read_text(encoding="utf-8").split()


def play(episode: int, tokens: int, rng: np.random.Generator) -> Trajectory:
    """Make a finished episode. Its ids are as frequent as words in a text, and all episodes of a group have the same
    opening."""
    recorder = Recorder(VOCAB, trajectory_id=f"train-{episode // GROUP}-{episode % GROUP}")
    opening = np.random.default_rng(episode // GROUP).integers(0, VOCAB, TURN - SAMPLED, dtype=np.int32)
    history, messages = opening, [_message("user", TURN - SAMPLED)]
    for turn in range(tokens // TURN):
        completion = np.minimum(rng.zipf(1.2, SAMPLED), VOCAB - 1).astype(np.int32)
        recorder.record(
            prompt_ids=history,
            completion_ids=completion,
            logprobs=-rng.exponential(0.5, SAMPLED).astype(np.float32),
            policy_versions=np.full(SAMPLED, 7 + turn // 20, np.int32),
            state_key=f"state {turn}",
            timing=TurnTiming(queued=rng.random(), generated=rng.random(), tools=rng.random()),
        )
        answer = np.minimum(rng.zipf(1.2, TURN - SAMPLED), VOCAB - 1).astype(np.int32)
        history = np.concatenate([history, completion, answer])
        messages += [_message("assistant", SAMPLED), _message("tool", TURN - SAMPLED)]
    group, place = divmod(episode, GROUP)
    return Trajectory(
        example_id=f"example {group}",
        turns=tuple(recorder.turns),
        messages=tuple(messages),
        env="big",
        reward=float(rng.random()),
        trajectory_id=f"train-{group}-{place}",
        group_id=f"train-{group}",
        sample_index=place,
        seed=episode,
        stop_reason="stop",
    )


def _message(role: str, num_tokens: int) -> dict[str, Any]:
    return {"role": role, "content": " ".join(random.choices(WORDS, k=num_tokens * 2 // 3))}


def seconds() -> float:
    """The processor time in seconds of this process and of the processes that it started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Meter:
    """Times parts, while a thread measures for how long it cannot run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.longest_hold: dict[str, float] = {}

    def measure(self, part: str, work: Callable[[], T]) -> T:
        """Do the work of a part and measure it; returns the result of the work."""
        watch = _Watch()
        began = seconds()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds() - began
        self.longest_hold[part] = max(self.longest_hold.get(part, 0.0), watch.end())
        return result


class _Watch:
    """A thread that wakes up each millisecond, in the way of an event loop."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._longest = 0.0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(0.001):
            now = time.perf_counter()
            self._longest, before = max(self._longest, now - before), now

    def end(self) -> float:
        """End the thread; returns the longest time between two wake-ups, in seconds."""
        self._over.set()
        self._thread.join()
        return self._longest


def run(num_episodes: int, tokens: int) -> dict[str, Any]:
    """Make the episodes, then measure each part once."""
    rng = np.random.default_rng(0)
    played = [play(episode, tokens, rng) for episode in range(num_episodes)]
    groups = [
        Group(
            group_id=f"train-{g}",
            example_id=f"example {g}",
            env="big",
            index=g,
            trajectories=tuple(played[g * GROUP : (g + 1) * GROUP]),
        )
        for g in range(num_episodes // GROUP)
    ]
    filters = {name: FILTERS[name]() for name in ("gibberish", "repetition", "zero_advantage")}
    advantage = ADVANTAGES["default"]
    rules = GroupRules(
        advantage=advantage, filters=filters, strategy="interleaved", max_length=10 * tokens, max_off_policy_steps=8
    )
    meter = Meter()
    credited = meter.measure("credit", lambda: [assign_advantages(group, advantage) for group in groups])
    meter.measure("filters", lambda: [apply_filters(t, filters) for g in credited for t in g.trajectories])
    batch: list[AssembledGroup] = meter.measure("all", lambda: [assemble_group(g, rules, 8) for g in groups])
    parts = meter.seconds
    parts["samples"] = parts.pop("all") - parts["credit"] - parts["filters"]
    samples = [sample for group in batch for sample in group.samples]
    with tempfile.TemporaryDirectory() as name:
        exchange = Exchange.open(Path(name) / "run" / "exchange")
        message = TrainerMessage(kind="train", version=1, samples=tuple(samples))
        meter.measure("order", lambda: exchange.send(1, message))
        (path,) = exchange.messages.iterdir()
        order_bytes = path.stat().st_size
        found = meter.measure("read", lambda: read(exchange))
        assert sum(sample.num_trained_tokens for sample in found) == num_episodes * tokens // 2
        succeeded = {t.trajectory_id: True for t in played}
        meter.measure("metrics", lambda: rollout_metrics(batch, 8, succeeded, 8))
        trained = sum(group.num_trained_tokens for group in batch)
        said = TrainedTokens(
            logprobs=-rng.exponential(0.5, trained).astype(np.float32),
            gradients=rng.normal(0, 1, trained).astype(np.float32),
        )
        outcomes = [outcome for group in batch for outcome in group.outcomes]
        outcomes = meter.measure("report", lambda: _with_tokens(outcomes, samples, said))
        files = OutcomeFolder(Path(name) / "outcomes")
        meter.measure("log", lambda: files.write(8, outcomes))
        log_bytes = files.files[8].size
    parts["total"] = sum(parts.values()) - parts["read"]
    return {
        "benchmark": "handed_over",
        "episodes": num_episodes,
        "tokens": num_episodes * tokens,
        "sampled_tokens": trained,
        "seconds": {name: round(value, 3) for name, value in parts.items()},
        "longest_hold": {name: round(value, 3) for name, value in meter.longest_hold.items()},
        "order_bytes_per_token": round(order_bytes / (num_episodes * tokens), 2),
        "log_bytes_per_sampled_token": round(log_bytes / trained, 2),
        "log_megabytes": round(log_bytes / 1e6, 1),
    }


def read(exchange: Exchange) -> list[Any]:
    """Read the message as the trainer does, and access every array of every sample."""
    samples = exchange.wait_for_message(1, lambda: None).samples
    for sample in samples:
        for name in (
            "token_ids",
            "loss_mask",
            "logprobs",
            "advantages",
            "chunk_ids",
            "policy_versions",
            "temperatures",
        ):
            getattr(sample, name)[-1]
    return list(samples)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16_384, help="of an episode")
    parser.add_argument("--short", action="store_true", help="64 episodes of 4,096 tokens")
    args = parser.parse_args()
    print(json.dumps(run(64, 4096) if args.short else run(args.episodes, args.tokens)))


if __name__ == "__main__":
    main()
