"""Tests that the memory and the file descriptors of a server process do not grow under normal and hostile load for a
long time.

The load is that of `server_attacks`: a healthy client all the time, and each class of attack in turn for some seconds.
Two seconds after the end of each attack, a reading is taken of the resident memory (of the server and of the processes
that render conversations) and of the server's open descriptors. The verdict compares the medians of the readings in the
second and in the last quarter.

Prints a line for each reading, and one JSON line: `memory_growth` (last quarter divided by second quarter; required: at
most 1.05), `descriptors_growth` (number of additional descriptors; required: at most 10), `requests` (number of the
healthy client's requests), and `longest` (its longest request in seconds).
Run: python benchmarks/server_soak.py --minutes 60
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from server_attacks import ATTACKS, Address, attack, serving, watch


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A reading of the server's process and its children at one time."""

    minute: float
    memory: float
    """Resident memory of all these processes in mebibytes."""
    descriptors: int
    """Number of open descriptors in the server's own process."""


def descendants(pid: int) -> list[int]:
    """The ids of a process and of all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def read(pid: int, began: float) -> Reading:
    resident = 0
    for one in descendants(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:  # the process has ended meanwhile
            continue
        resident += int(status.partition("VmRSS:")[2].split()[0]) if "VmRSS:" in status else 0
    return Reading(
        minute=(time.monotonic() - began) / 60,
        memory=resident / 1024,
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
    )


def attack_in_turn(address: Address, pid: int, seconds: float, stop: threading.Event, readings: list[Reading]) -> None:
    began = time.monotonic()
    for name in itertools.cycle(ATTACKS):
        attacker = multiprocessing.get_context("spawn").Process(target=attack, args=(address, name), daemon=True)
        attacker.start()
        ended = stop.wait(seconds)
        attacker.kill()
        attacker.join()
        if ended or stop.wait(2.0):
            return
        readings.append(read(pid, began))
        print(readings[-1], "after", name, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="(60)")
    parser.add_argument("--attack-seconds", type=float, default=8.0, help="of each class (8)")
    args = parser.parse_args()
    readings: list[Reading] = []
    requests, longest = 0, 0.0
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (pid, address):
        began = time.monotonic()
        attacker = threading.Thread(target=attack_in_turn, args=(address, pid, args.attack_seconds, stop, readings))
        attacker.start()
        try:
            while time.monotonic() - began < 60 * args.minutes:
                found, health = watch(address, 5.0)
                requests, longest = requests + len(found), max(longest, *found, health)
        finally:
            stop.set()
            attacker.join()
    quarter = max(1, len(readings) // 4)
    early, late = readings[quarter : 2 * quarter] or readings, readings[-quarter:]
    memory = statistics.median(r.memory for r in late) / statistics.median(r.memory for r in early)
    descriptors = statistics.median(r.descriptors for r in late) - statistics.median(r.descriptors for r in early)
    print(
        json.dumps(
            {
                "memory_growth": round(memory, 3),
                "descriptors_growth": descriptors,
                "requests": requests,
                "longest": round(longest, 3),
                "minutes": args.minutes,
                "memory_MiB": round(late[-1].memory),
            }
        )
    )


if __name__ == "__main__":
    main()
