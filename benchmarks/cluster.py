"""Measures how many servers one orchestrator can drive, with its real loop, dispatcher, ledger, groups and routing, on
simulated servers.

Time is virtual (`cluster_clock.py`). Servers (`cluster_server.py`), episodes and tools (`cluster_episodes.py`) and the
trainer (`cluster_trainer.py`) are simulated; everything between them is the code of a real run
(`cluster_simulation.py`). Servers sample tokens at the published speed of an 8B model on an H100, cache prefixes, load
weights, fail and recover. The durations of tools have long tails. The result is compared with the throughput that the
same servers could have at best (`cluster_ideal.py`).

With `--core free`, the processor time of the code costs no virtual time, so that only the scheduling rules limit the
throughput. With `--core one`, the code runs on one core of this machine: virtual time passes while the code computes.
`--core wire` adds the cost of the HTTP client for each message. Not included are the rendering of conversations, the
full number of tokens (sequences of ids are `SCALE` times shorter), and the trajectory log.

Prints one JSON line for each row, then a table. The progress and the figures so far are printed to stderr. A full run
takes half an hour on one core and 8 GB of memory; `--short` takes three minutes.
Run: python benchmarks/cluster.py [--short] [--servers 1 10 100 1000] [--core free one wire]
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from typing import Any

from cluster_clock import running, virtual_runner
from cluster_figures import figures, memory, show
from cluster_progress import Progress
from cluster_simulation import Setting, Simulation
from cluster_stacks import sampled_stacks


def simulate(setting: Setting) -> dict[str, Any]:
    """Simulate one row of the table; returns its figures by name."""
    before, began = memory(), time.thread_time()
    with virtual_runner(0.0 if setting.core == "free" else 1.0) as runner, sampled_stacks() as stacks:

        async def main() -> tuple[Simulation, int]:
            simulation = Simulation(setting, running(), Progress())
            await simulation.run()
            return simulation, memory()

        simulation, after = runner.run(main())
    return {**figures(simulation, after - before), "top": stacks(), "processor_seconds": time.thread_time() - began}


def main() -> None:
    """Simulate all rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--per-server", type=int, default=100, help="episodes at once on each server")
    parser.add_argument("--core", nargs="+", choices=("free", "one", "wire"), default=["free", "one"])
    parser.add_argument("--level", type=int, default=4, help="max_async_level")
    parser.add_argument("--batch-share", type=float, default=0.5, help="a batch, as a share of the episodes at once")
    parser.add_argument("--warm-up", type=int, help="steps before those that are measured; by default 4, 2 of 1,000")
    parser.add_argument("--steps", type=int, help="to be measured; by default 12 of few servers, 2 of 1,000")
    parser.add_argument(
        "--short", action="store_true", help="three minutes: fewer steps, and 10 episodes on each of 1,000 servers"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    rows = []
    for servers in args.servers:
        for core in ["one"] if args.short else args.core:
            most = max(2, (80 if args.short else 200) // servers)
            per_server = min(args.per_server, max(10, 10_000 // servers)) if args.short else args.per_server
            row = simulate(
                Setting(
                    servers=servers,
                    per_server=per_server,
                    core=core,
                    level=args.level,
                    batch_share=args.batch_share,
                    warm_up=args.warm_up or min(4, most),
                    steps=args.steps or min(12, most),
                )
            )
            rows.append(row)
            print(json.dumps({"benchmark": "cluster", **row}), flush=True)
    print(show(rows))


if __name__ == "__main__":
    main()
