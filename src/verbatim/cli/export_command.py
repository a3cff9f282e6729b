"""`verbatim export RUN`: writes the trajectories of a run as JSON lines, for tools that cannot read Parquet."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.core.disk import replacing, temporary_beside
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inspection.viewer.run_state import check_run
from verbatim.logs.monitors.trajectory_log import TrajectoryLog, read_trajectories


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: RUN, `--out` and `--steps`."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, such as runs/NAME/latest")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to create")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="only these steps: 7 or 3-9 (all)")


def run(args: argparse.Namespace) -> int:
    """Write one line per trajectory.

    Raises:
        UsageError: there are no trajectories, the file exists already, or --steps is not a range.
    """
    first, last = _steps(args.steps)
    if args.out.exists():
        raise UsageError(f"--out {args.out} exists already; name a new file")
    if not args.folder.is_file() and not any(args.folder.glob("*.parquet")):
        check_run(args.folder, "verbatim export")
    count = 0
    with (
        replacing(args.out, temporary=temporary_beside(args.out)) as partial,  # no partial file if reading fails later
        contextlib.closing(TrajectoryLog(partial)) as log,
    ):
        for step, trajectory in read_trajectories(args.folder):
            if first <= step and (last is None or step <= last):
                log.write(step, trajectory)
                count += 1
        if not count:
            asked = f" of the steps {args.steps}" if args.steps else ""
            raise UsageError(f"{args.folder} has no trajectories{asked}; {args.out} was not written")
    PlainConsole().print(f"wrote {count:,} trajectories to {args.out}", soft_wrap=True)
    return exit_status.FINISHED


def _steps(text: str | None) -> tuple[int, int | None]:
    """Return (1) the first step and (2) the last step, None to go up to the end."""
    if text is None:
        return 0, None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--steps {text}: expected a step or a range, such as 7 or 3-9")
    return int(match[1]), int(match[2] or match[1])
