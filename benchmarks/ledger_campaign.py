"""Makes short runs in which everything goes wrong that can go wrong, and tests whether a sampled token is ever missing
from the ledger.

The runs have a few batches, and the following faults: tasks that outlive their episode, cancelled siblings, tools that
raise or hang, deadlines, failing engines, failing trainers, stops and resumes. Every fifth run uses the embedded
engine; the others use the scripted sampler, on virtual time that jumps from event to event. At every checkpoint and at
the end, the ledger is compared with the engine's own count of sampled tokens. Prints one JSON line. `pytest --whole`
makes the same number of runs (tests/run/orchestrator/test_ledger_campaign.py).

    python benchmarks/ledger_campaign.py [--runs 500] [--first-seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from run.orchestrator.faulty_runs import CampaignCounts, faulty_run, tiny_model
from run.orchestrator.virtual_runs import on_virtual_time

EMBEDDED_EVERY = 5
"""One in this number of runs uses the embedded engine."""


def main() -> None:
    """Make the runs and print one JSON line. The exit status is 1 if a token is missing from the ledger."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    model, began, total = tiny_model(), time.perf_counter(), CampaignCounts()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
            engine = model if seed % EMBEDDED_EVERY == 0 else None
            play = asyncio.run if engine is not None else on_virtual_time
            found = play(faulty_run(seed, engine, Path(folder)))
            if found.outside:
                print(f"seed {seed}: {found.outside} of {found.drawn} tokens are outside", file=sys.stderr)
            total.add(found)
    shutil.rmtree(model)
    print(
        json.dumps(
            {
                "benchmark": "ledger_campaign",
                "runs": total.runs,
                "tokens_drawn": total.drawn,
                "tokens_outside_the_ledger": total.outside,
                "after_the_checkpoint_gone_on_from": total.rolled_back,
                "outcomes": dict(total.outcomes.most_common()),
                "ends": dict(total.ends.most_common()),
                "failed_episodes": dict(total.errors.most_common()),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    )
    sys.exit(1 if total.outside else 0)


if __name__ == "__main__":
    main()
