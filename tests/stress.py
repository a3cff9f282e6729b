"""Runs tests again and again on a machine that has no time for them, and says which failed. It also shows pytest's
warnings, because an exception on a thread fails no test and is only a warning.

    python tests/stress.py --rounds 20 --loops 4 -- -m "realtime and not vllm"
    python tests/stress.py --rounds 1 --loops 4 --nice 19 -- -m "realtime and not vllm"

A test that fails here depends on time: on a busy machine it would refuse a change that is right.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
WARNED = re.compile(r"^=+ warnings summary =+$\n(.+?)^-- Docs: ", re.MULTILINE | re.DOTALL)
ENDED = re.compile(r"^(?=.*\b(?:passed|failed|error))(.+) in [\d.]+s.*$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 where no test failed in any round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often all of them run")
    parser.add_argument("--loops", type=int, default=4, help="processes that do nothing but take the processor")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="of pytest-xdist")
    parser.add_argument("--nice", type=int, default=0, help="how far the tests stand back behind the busy loops")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args(arguments)
    failed: Counter[str] = Counter()
    broken = 0
    with busy(given.loops):
        for number in range(1, given.rounds + 1):
            began = time.monotonic()
            done = subprocess.run(
                [
                    "nice",
                    "-n",
                    str(given.nice),
                    sys.executable,
                    "-m",
                    "pytest",
                    "-n",
                    str(given.workers),
                    "--dist",
                    "worksteal",
                    "-p",
                    "no:cacheprovider",
                    *given.pytest,
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            names = FAILED.findall(done.stdout)
            failed.update(names)
            broken += done.returncode != 0
            ended = ENDED.findall(done.stdout)
            result = ended[-1] if ended else "no result"
            print(f"round {number}: {result}, {time.monotonic() - began:.0f} s", flush=True)
            for warnings in WARNED.findall(done.stdout):
                print(warnings.rstrip(), flush=True)
            if names or not ended:
                print(done.stdout[-20_000:], done.stderr[-2000:], flush=True)
    for name, count in failed.most_common():
        print(f"{count:>4} of {given.rounds}  {name}")
    print(f"{given.rounds} rounds, {broken} with a failure, {len(failed)} tests that failed")
    return 1 if broken else 0


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes take the processor for as long as the block lasts."""
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _loop() -> None:
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
