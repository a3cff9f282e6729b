"""`python -m gpu_kit PART [--cpu] [--out FOLDER]` runs one part: correctness, speed, whole_run or comparison.

Writes FOLDER/PART.json. Exit status: 0 all checks passed, 1 one failed, 3 none failed and one did not run.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .record import EXIT_OF, NOT_RUN, Check, part_record, record_of, write_json
from .setting import Setting
from .watch import SECONDS, patience_of, run_child, watched

PARTS = ("correctness", "speed", "whole_run", "comparison")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_kit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cpu", action="store_true", help="everything at the smallest sizes, on the CPU")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the result")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="limit of the part; 10 times as many on a slow machine give each check 10 times as long",
    )
    parser.add_argument("--checks", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    checks = chosen(args.part, args.checks)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        device, patience = "cpu" if args.cpu else "cuda", patience_of(args.seconds)
        setting = Setting(device=device, tiny=args.cpu, folder=Path(name), patience=patience)
        if args.child is not None:
            return run_child(checks, setting, args.child)
        return run_part(args.part, checks, setting, args.out, args.seconds)


def chosen(part: str, names: Sequence[str] | None) -> list[Check]:
    """The checks of a part, or those of these names."""
    checks: list[Check] = list(importlib.import_module(f"{__package__}.{part}").CHECKS)
    if names is None:
        return checks
    if unknown := set(names) - {check.name for check in checks}:
        sys.exit(f"{part} has no check {', '.join(sorted(unknown))}; it has: {', '.join(c.name for c in checks)}")
    return [check for check in checks if check.name in names]


def run_part(part: str, checks: Sequence[Check], setting: Setting, out: Path, seconds: float) -> int:
    """Run checks and write the part's record; returns the exit status."""
    import torch

    began = time.perf_counter()
    if setting.device == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no CUDA device; --cpu runs everything at the smallest sizes"
        records = [record_of(check, NOT_RUN, 0.0, reason=reason) for check in checks]
    else:
        records = watched(part, checks, setting, seconds)
    told = part_record(part, setting, records, time.perf_counter() - began)
    write_json(out / f"{part}.json", told)
    counts = ", ".join(f"{number} {status}" for status, number in told["counts"].items())
    print(
        f"{part}: {told['status']} ({counts}) on {told['device']} in {told['seconds']} s; {out / part}.json", flush=True
    )
    return EXIT_OF[told["status"]]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is then ended, not left behind
    sys.exit(main())
