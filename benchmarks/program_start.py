"""Measures what a separate process per episode costs, compared with a reused process. The program imports OpenAI's SDK
and sends one request.

All episodes start at the same time, and the sampler answers immediately. At most eight programs start at a time. Prints
one JSON line with two figures for each number of episodes: the programs' processor time per episode in seconds
(including sandboxes and shells if each episode has its own process), and the seconds until the last episode has ended.

Run: python benchmarks/program_start.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inspection.envcheck.byte_chat import VOCAB_SIZE, ByteChat, written
from verbatim.rollouts.gateway.program.environment import Program
from verbatim.rollouts.group import GroupRun
from verbatim.rollouts.runner import RolloutSetup

ONCE = """
import sys
from openai import OpenAI
sys.stdin.readline()
OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
print(1.0)
"""
LINES = """
import json, sys, time
from openai import OpenAI
first = OpenAI(api_key="-")
for line in sys.stdin:
    order = json.loads(line)
    client = first.with_options(base_url=order["base_url"], api_key=order["api_key"])
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    print(json.dumps({"id": order["id"], "reward": time.process_time()}), flush=True)
"""


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def play(folder: Path, count: int, *, reuse: bool, sandbox: bool) -> tuple[float, float]:
    """Play the episodes. Returns (1) the seconds until all episodes have ended, and (2) the processor time in seconds:
    that of the processes that have ended, or the time that a reused program reports about itself."""
    sampler = ScriptedSampler(
        script=lambda _: np.array(written({"content": "hello"}), np.int32), vocab_size=VOCAB_SIZE, context_length=10_000
    )
    program = Program(
        [sys.executable, "lines.py" if reuse else "once.py"],
        [{"id": "0"}],
        cwd=str(folder),
        sandbox=sandbox,
        reuse=reuse,
        max_processes=1,
        episodes_per_process=count,
    )
    setup = RolloutSetup(
        env="program",
        environment=program,
        sampler=sampler,
        renderer=ByteChat(),
        slots=asyncio.Semaphore(count),
        params=SamplingParams(max_tokens=100),
        limits=EpisodeLimits(max_context=10_000, timeout=600.0),
    )
    before, began = children(), time.perf_counter()
    group = await GroupRun(setup, program.examples("train")[0], index=0, size=count, run_seed=0).run()
    assert [trajectory.error for trajectory in group.trajectories] == [None] * count
    seconds = time.perf_counter() - began
    return seconds, max(t.reward or 0.0 for t in group.trajectories) if reuse else children() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 32], help="episodes at a time")
    parser.add_argument("--sandbox", action="store_true", help="each program in a sandbox")
    args = parser.parse_args()
    told: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "once.py").write_text(ONCE)
        (folder / "lines.py").write_text(LINES)
        for reuse in (False, True):
            for count in args.counts:
                seconds, processor = asyncio.run(play(folder, count, reuse=reuse, sandbox=args.sandbox))
                kind = "reused" if reuse else "once"
                told[f"{kind}_{count}_processor_s_per_episode"] = round(processor / count, 3)
                told[f"{kind}_{count}_seconds"] = round(seconds, 2)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
