"""Tests whether hostile requests leave anything behind in a gateway, by its memory and its file descriptors after each
round.

Each round sends every request of the campaign in `tests/rollouts/gateway/test_hostile_gateway.py`, eight at a time.
Each request goes to a session of its own, which ends after the request. At the same time, a healthy client sends
requests. Gateway and clients share the process, so both are measured. The first rounds fill caches; therefore the
figures are slopes over the second half of the rounds. Live memory is the memory of reachable Python objects. Resident
memory is counted by the kernel, and includes memory that the allocator keeps between large requests.

Prints a line for each round and each wrong answer, and one JSON line: `live_kib_per_1000` and `resident_kib_per_1000`,
the growth in KiB per 1,000 hostile requests (required: at most 10 for live memory); `descriptors`, the number of open
descriptors after the last round minus that after the first round; `requests`, the number of requests; and `wrong`, the
number of wrong answers.
Run: python benchmarks/gateway_memory.py --rounds 8
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tracemalloc
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gateway")]

from scripted_gateway import scripted  # noqa: E402
from test_hostile_gateway import a_gateway, faults_in, of_a_gateway, spoken  # noqa: E402

from faults.hostile_requests import Case  # noqa: E402


def live() -> float:
    """The memory of reachable Python objects in KiB."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024


def resident() -> float:
    """The resident memory of this process in KiB."""
    return float(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def descriptors() -> int:
    """The number of open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def growth(readings: list[float], requests: int) -> float:
    """The growth per 1,000 requests over the second half of the rounds."""
    late = readings[len(readings) // 2 :]
    return round(1000 * statistics.linear_regression(range(len(late)), late).slope / requests, 1)


async def played(cases: list[Case], rounds: int) -> tuple[list[tuple[float, float, int]], list[str]]:
    """Play the rounds. Returns (1) live memory, resident memory and open descriptors after each round, and (2) the
    wrong answers."""
    found: list[tuple[float, float, int]] = []
    wrong: list[str] = []
    sampler = scripted(spoken)
    async with a_gateway(sampler) as gateway:
        for number in range(rounds):
            wrong += await faults_in(gateway, cases)
            sampler.requests.clear()  # the sampler keeps its requests for tests
            found.append((live(), resident(), descriptors()))
            print(
                f"round {number}: {found[-1][0]:,.0f} KiB live, {found[-1][1]:,.0f} resident, {found[-1][2]} "
                "descriptors",
                file=sys.stderr,
                flush=True,
            )
    return found, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="at least 4 (8)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth request (1)")
    args = parser.parse_args()
    tracemalloc.start(1)
    cases = of_a_gateway()[:: args.every]
    found, wrong = asyncio.run(played(cases, args.rounds))
    for each in dict.fromkeys(wrong):
        print(f"wrong: {each[:300]}", file=sys.stderr)
    print(
        json.dumps(
            {
                "live_kib_per_1000": growth([one[0] for one in found], len(cases)),
                "resident_kib_per_1000": growth([one[1] for one in found], len(cases)),
                "descriptors": found[-1][2] - found[0][2],
                "requests": len(cases) * args.rounds,
                "wrong": len(wrong),
            }
        )
    )


if __name__ == "__main__":
    main()
