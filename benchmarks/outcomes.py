"""Measures the writing of a run's trajectories: processor time per step, compared with JSON lines, and bytes per
sampled token.

Reads the trajectories of a finished run, such as that of `make demo`, and writes those of its last steps again, both in
the way of a run (one Parquet file per step) and as JSON lines. `share` is the processor time to write a file, divided
by the wall-clock time of a step in that run (required: at most 0.03). Bytes are the sizes of the files per sampled
token, for ids (prompts and completions), for the sampler's logprobs, and for everything else (required: at most 12).

Prints one JSON line of medians. Run on a quiet machine: python benchmarks/outcomes.py runs/guess_number/latest
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.metrics_log import read_metrics
from verbatim.logs.monitors.trajectory_log import TRAJECTORIES, TrajectoryLog
from verbatim.logs.outcomes.files import OutcomeFolder, files_in, read_outcomes


def seconds_of(write: Callable[[], object]) -> float:
    """Call `write`; returns the processor time in seconds that this process took, with all its threads."""
    began = time.process_time()
    write()
    return time.process_time() - began


def write_lines(path: Path, step: int, outcomes: list[TrajectoryOutcome]) -> None:
    """Write the trajectories of a step as JSON lines, as older versions of Verbatim did."""
    log = TrajectoryLog(path / f"{step}.jsonl")
    for outcome in outcomes:
        log.write(step, outcome.trajectory)
    log.close()


def bytes_by_kind(folder: Path) -> dict[str, int]:
    """The compressed size in bytes of the files' columns, by kind of column."""
    found = {"ids": 0, "logprobs": 0, "rest": 0}
    for path in files_in(folder).values():
        file = pq.ParquetFile(path).metadata
        found["rest"] += path.stat().st_size
        for group in range(file.num_row_groups):
            for index in range(file.num_columns):
                column = file.row_group(group).column(index)
                kind = {"completion_ids": "ids", "prompt_new_ids": "ids", "logprobs": "logprobs"}
                name = next((kind[part] for part in column.path_in_schema.split(".") if part in kind), "rest")
                if name != "rest":
                    found[name] += column.total_compressed_size
                    found["rest"] -= column.total_compressed_size
    return found


def main() -> None:
    """Write each step in both forms, one after the other, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="the last ones")
    args = parser.parse_args()
    steps = [line for line in read_metrics(args.run / "metrics.jsonl") if line["kind"] == "train"][-args.steps :]
    first = steps[0]["step"]
    kept = (pair for pair in read_outcomes(args.run / TRAJECTORIES) if pair[0] >= first)
    parquet, lines, tokens, trajectories = [], [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        files = OutcomeFolder(Path(name) / "files")
        for step, pairs in groupby(kept, key=lambda pair: pair[0]):
            outcomes = [outcome for _, outcome in pairs]
            parquet.append(seconds_of(lambda step=step, outcomes=outcomes: files.write(step, outcomes)))
            lines.append(seconds_of(lambda step=step, outcomes=outcomes: write_lines(Path(name), step, outcomes)))
            tokens += sum(outcome.trajectory.num_sampled_tokens for outcome in outcomes)
            trajectories += len(outcomes)
        written = bytes_by_kind(files.path)
        size_of_lines = sum(path.stat().st_size for path in Path(name).glob("*.jsonl"))
    median_step = statistics.median(line["metrics"]["time/step"] for line in steps)
    print(
        json.dumps(
            {
                "benchmark": "outcomes",
                "steps": len(parquet),
                "trajectories_per_step": trajectories / len(parquet),
                "sampled_tokens_per_step": tokens / len(parquet),
                "seconds_per_step": round(statistics.median(parquet[1:]), 4),
                "jsonl_seconds_per_step": round(statistics.median(lines[1:]), 4),
                "jsonl_over_parquet": round(
                    statistics.median(b / a for a, b in zip(parquet[1:], lines[1:], strict=True)), 2
                ),
                "run_seconds_per_step": round(median_step, 3),
                "share": round(statistics.median(parquet[1:]) / median_step, 4),
                **{f"bytes_per_token_{kind}": round(count / tokens, 2) for kind, count in written.items()},
                "jsonl_bytes_per_token": round(size_of_lines / tokens, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
