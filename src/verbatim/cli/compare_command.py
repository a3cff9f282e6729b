"""`verbatim compare RUN RUN...`: compares the configuration, curves, evaluations, speed and alarms of runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inspection.comparison.compared import compare_runs, comparison_to_json
from verbatim.inspection.comparison.draw import draw_comparison
from verbatim.inspection.comparison.show import show_comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: the runs, --metric, --plot and --json."""
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="RUN", help="the folders of runs, such as runs/NAME/latest")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="also compare this metric of the steps, and draw its curve; repeatable",
    )
    add("--plot", type=Path, metavar="PNG", help="draw the curves into this file")
    add("--json", action="store_true", help="print everything as one JSON object on standard output, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Read the runs, including unfinished runs, and print the differences.

    Raises:
        UsageError: there are fewer than two runs, a folder is not a run, no run has the metric, or the plot file exists
            already.
    """
    if args.plot is not None and args.plot.exists():
        raise UsageError(f"--plot {args.plot} exists already; name a new file")
    comparison = compare_runs(args.folders, args.metric)
    console = PlainConsole(quiet=args.json)
    show_comparison(comparison, console)
    if args.json:
        sys.stdout.write(json.dumps(comparison_to_json(comparison), indent=2) + "\n")
    if args.plot is not None:
        draw_comparison(comparison, args.plot)
        console.print(f"wrote {args.plot}", soft_wrap=True)
    return exit_status.FINISHED
