"""Measures the recording of an episode's turns and the building of its training samples, in prompt tokens per second
and in bytes kept.

Every turn has 256 new ids, half of which are sampled, and is passed with its full prompt, as in a rollout. The loads:

- `extends`: each prompt extends the turn before exactly, so the episode is one sample.
- `breaks`: half of each completion is missing from the next prompt (stripped thinking), so every turn is a sample.

Each load is measured with the prompts as int32 arrays and as Python lists. The rate is the number of ids in all prompts
per second of processor time. Flatness is the time per id for 128 turns, divided by that for 16 turns (required: at most
1.25). The arrays of a sample are made when they are read. `packed` is the rate if the arrays that packing reads are
read too (the ids of every sample, and the arrays of its trained tokens); `read` is the rate if every array of every
sample is read. Memory is the number of bytes that 1,000 recorded episodes of 64 turns add to the process, divided by
the number of their distinct ids (required: at most 16 bytes), without message texts.

Prints one JSON line of medians. Run on one core: python benchmarks/samples.py [--without-memory]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim import Trajectory, TurnTiming, build_samples
from verbatim.rollouts import Recorder

TURNS = (16, 32, 64, 128)
NEW, SAMPLED = 256, 128
VOCAB = 151_936
ARRAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures")
PACKED = ("token_ids", "temperatures", "logprobs", "advantages", "chunk_ids")


@dataclass(frozen=True)
class Request:
    """One turn, as the engine passes it to the recorder."""

    prompt: Any
    completion: Any
    logprobs: Any
    versions: Any


def play(turns: int, rng: np.random.Generator, *, breaks: bool, lists: bool, sampled: int = SAMPLED) -> list[Request]:
    """Make the requests of one episode."""
    history = np.zeros(0, dtype=np.int32)
    requests = []
    for _ in range(turns):
        prompt = np.concatenate([history, rng.integers(0, VOCAB, NEW - sampled, dtype=np.int32)])
        completion = rng.integers(0, VOCAB, sampled, dtype=np.int32)
        made = (prompt, completion, -rng.random(sampled, dtype=np.float32), np.full(sampled, 3, dtype=np.int32))
        requests.append(Request(*(array.tolist() for array in made)) if lists else Request(*made))
        history = np.concatenate([prompt, completion[sampled // 2 :] if breaks else completion])
    return requests


def record(requests: Sequence[Request]) -> Trajectory:
    """Record the requests as a rollout does; returns the trajectory."""
    recorder = Recorder(VOCAB)
    for request in requests:
        recorder.record(
            prompt_ids=request.prompt,
            completion_ids=request.completion,
            logprobs=request.logprobs,
            policy_versions=request.versions,
        )
    return Trajectory(example_id="x", turns=tuple(recorder.turns), advantage=0.5)


def rates(turns: int, repetitions: int, *, breaks: bool, lists: bool) -> tuple[float, float, float]:
    """Return three rates in prompt ids per second, each from the median over the repetitions: for recording and
    building alone, for also reading what packing reads, and for also reading every array."""
    requests = play(turns, np.random.default_rng(turns), breaks=breaks, lists=lists)
    handed_over = sum(len(request.prompt) for request in requests)
    seconds: list[tuple[float, float, float]] = []
    for _ in range(repetitions):
        began = time.thread_time()
        samples = build_samples(record(requests))
        built = time.thread_time() - began
        began = time.thread_time()
        for sample in samples:
            sample.trained_places()
            for name in PACKED:
                sample.trained(name)
        packed = time.thread_time() - began
        began = time.thread_time()
        for sample in samples:
            for name in ARRAYS:
                getattr(sample, name)
        seconds.append((built, built + packed, built + time.thread_time() - began))
        assert len(samples) == (turns if breaks else 1)
    built, packed, read = (handed_over / statistics.median(each) for each in zip(*seconds, strict=True))
    return built, packed, read


def bytes_per_token_alone(*args: int) -> float:
    """Call `bytes_per_token` in a new process, in which no memory that was freed earlier can be reused."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(bytes_per_token, args)


def bytes_per_token(episodes: int, turns: int, sampled: int) -> float:
    """The resident bytes per distinct id of recorded episodes."""
    rng = np.random.default_rng(0)
    kept = [record(play(turns, rng, breaks=False, lists=False, sampled=sampled))]
    gc.collect()
    before = _resident_bytes()
    for _ in range(episodes):
        recorder = Recorder(VOCAB)
        for request in play(turns, rng, breaks=False, lists=False, sampled=sampled):
            recorder.record(
                prompt_ids=request.prompt,
                completion_ids=request.completion,
                logprobs=request.logprobs,
                policy_versions=request.versions,
                timing=TurnTiming(generated=rng.random(), tools=rng.random()),
                state_key="state",
            )
        kept.append(Trajectory(example_id="x", turns=tuple(recorder.turns)))
    gc.collect()
    added = _resident_bytes() - before
    distinct = sum(trajectory.num_stored_tokens for trajectory in kept[1:])
    assert distinct == episodes * turns * NEW
    return added / distinct


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=51, help="episodes of each load")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes kept for the memory figure")
    parser.add_argument("--without-memory", action="store_true", help="leave the memory figure out")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result: dict[str, Any] = {"benchmark": "samples", "turns": TURNS}
    if not args.without_memory:
        result["bytes_per_token"] = {
            f"{sampled} of {NEW} sampled": round(bytes_per_token_alone(args.episodes, 64, sampled), 2)
            for sampled in (128, 255)
        }
    for breaks in (False, True):
        for lists in (False, True):
            found = [rates(turns, args.repetitions, breaks=breaks, lists=lists) for turns in TURNS]
            name = f"{'breaks' if breaks else 'extends'}_{'lists' if lists else 'arrays'}"
            result[name] = {
                "million_prompt_tokens_per_second": [round(built / 1e6, 1) for built, _, _ in found],
                "packed": [round(packed / 1e6, 1) for _, packed, _ in found],
                "read": [round(read / 1e6, 1) for _, _, read in found],
                "flatness": round(found[0][0] / found[-1][0], 3),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
