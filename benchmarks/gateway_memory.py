"""Whether hostile requests leave anything behind in a gateway: its resident memory and its descriptors by round.

Each round sends every request of the campaign in `tests/rollouts/gateway/test_hostile_gateway.py`, eight at a time,
each to a session of its own that ends after it, and a healthy client asks beside them. Gateway and clients share the
process, so both are measured. The first rounds fill caches; the figures are slopes over the second half of the rounds.
What is live is what Python's objects hold; resident is what the kernel counts, with what the allocator keeps between
large bodies.

Prints a line for each round and each wrong answer, and one JSON line: `live_kib_per_1000` and `resident_kib_per_1000`,
KiB of growth for 1,000 hostile requests (asked: at most 10 live), `descriptors`, those left open after the last round
beyond the first, `requests`, and `wrong`.
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
    """KiB that Python's objects hold, without what is unreachable."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1024


def resident() -> float:
    """KiB of this process."""
    return float(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def descriptors() -> int:
    """Those that are open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def growth(readings: list[float], requests: int) -> float:
    """Of the second half of the rounds, for 1,000 requests."""
    late = readings[len(readings) // 2 :]
    return round(1000 * statistics.linear_regression(range(len(late)), late).slope / requests, 1)


async def played(cases: list[Case], rounds: int) -> tuple[list[tuple[float, float, int]], list[str]]:
    """What is live, resident and open after each round, and what was wrong."""
    found: list[tuple[float, float, int]] = []
    wrong: list[str] = []
    sampler = scripted(spoken)
    async with a_gateway(sampler) as gateway:
        for number in range(rounds):
            wrong += await faults_in(gateway, cases)
            sampler.requests.clear()  # it keeps them for tests
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
