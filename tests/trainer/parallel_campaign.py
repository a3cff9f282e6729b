"""Compares the gradients of several processes with those of one on many seeded batches.

    python tests/trainer/parallel_campaign.py --processes 3 --batches 300
    python tests/trainer/parallel_campaign.py --processes 4 --sequence 2

Prints one JSON line: the settings, and the largest difference of a gradient (norm of the difference over the norm, per
parameter) and of a metric; and that parameter's norm as a share of the largest one in its step. Where that share is
below 1e-12, the gradient is a rounding error of 0, and the difference is taken over the largest norm.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import parallel_jobs
from parallel_ranks import crew
from trainer_helpers import write_llama, write_model

SETTINGS = (
    {"model": "tied", "batches": ["random"], "micro_batch_tokens": 40},
    {"model": "untied", "batches": ["random"], "micro_batch_tokens": 20, "gradient_checkpointing": True},
    {"model": "untied", "batches": ["shared"], "packing": "tree", "micro_batch_tokens": 30},
    {"model": "tied", "batches": ["random"], "loss": "gspo", "micro_batch_tokens": 20},
    {"model": "llama", "batches": ["random"], "loss": "ipa", "micro_batch_tokens": 30},
    {"model": "tied", "batches": ["shared"], "loss": "gspo", "packing": "tree", "micro_batch_tokens": 24},
)
"""Losses of every level, rows and trees, tied and untied heads, recomputed activations; each gets its seeds."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--sequence", type=int, default=1, help="processes that share each micro-batch")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, crew(args.processes) as processes:
        root = Path(folder)
        models = {
            "tied": write_model(root / "tied"),
            "untied": write_model(root / "untied", sliding_window=7, tied=False),
            "llama": write_llama(root / "llama"),
        }
        share = -(-args.batches // len(SETTINGS))
        sequence = {"parallel": {"sequence": args.sequence}}
        cases = [{**case, **sequence, "model": str(models[case["model"]])} for case in SETTINGS]
        found = [
            processes.run(parallel_jobs.campaign, [case], list(range(n * share, (n + 1) * share)), seconds=7200)[0]
            for n, case in enumerate(cases)
        ]
    farthest = max(figures["gradient"] for figures in found)
    print(
        json.dumps(
            {
                "processes": args.processes,
                "sequence": args.sequence,
                "batches": share * len(SETTINGS),
                "seconds": round(time.monotonic() - began),
                "largest_gradient_difference": farthest[0],
                "parameter": farthest[1],
                "its_share": farthest[2],
                "largest_gradient_difference_by_setting": [figures["gradient"] for figures in found],
                "largest_metric_difference": max(figures["metrics"] for figures in found),
            }
        )
    )


if __name__ == "__main__":
    main()
