"""`verbatim view RUN`: shows runs as a page in the browser, or exports the page as an HTML file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.cli import exit_status
from verbatim.cli.argument_types import FROM_ZERO
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import printable
from verbatim.rollouts.main_loop import run_until_asked
from verbatim.run.logs import log_to_console

if TYPE_CHECKING:
    from verbatim.inspection.viewer.assets import Asset
    from verbatim.inspection.viewer.run_view import RunView

_FILTERS = ("kind", "env", "step", "reward", "stop-reason", "reason", "flag", "group", "text")
"""The options that filter trajectories, as on the page."""
_TRAJECTORIES = 200
"""Default number of exported trajectories."""
_PORT = 8642
"""Default port; if it is in use, a free port is taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: RUN, --port, --no-open, --model, --export and the filters of an export."""
    parser.epilog = "Ctrl-C ends it, with exit status 0. The page is reachable from this machine only"
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, such as runs/NAME/latest")
    add("--port", type=int, help="(8642, or a free port if that is in use); 0 selects a free port")
    add("--no-open", action="store_true", help="print the address only, and open no browser")
    add("--model", type=Path, metavar="FOLDER", help="the model whose tokenizer decodes the ids (the run's)")
    add("--export", type=Path, metavar="FILE", help="instead, write the page with its data into a new HTML file")
    export = parser.add_argument_group("trajectories for --export; these are the filters of the page")
    add = export.add_argument
    add("--trajectories", type=FROM_ZERO, metavar="N", help=f"maximum number of trajectories ({_TRAJECTORIES})")
    add("--sort", metavar="COLUMN", help="the order: -reward, reward, -num_breaks, ... (the newest step first)")
    add("--kind", choices=("train", "eval"), help="of training, or of evaluations")
    add("--env", metavar="NAME", help="of this environment")
    add("--step", metavar="RANGE", help="of these steps: 7, 3-9, 3-")
    add("--reward", metavar="RANGE", help="with a reward in this range: 1, 0-0.5")
    add("--stop-reason", metavar="NAME", help="with this stop reason")
    add("--reason", metavar="NAME", help='dropped as a whole for this reason; "(none)": not dropped')
    add("--flag", metavar="NAME", help="flagged by this filter")
    add("--group", metavar="ID", help="of this group")
    add("--text", metavar="TEXT", help="with this text in an id, an example, an error or a message")
    add("--breaks", action="store_true", help="with a break")
    add("--errors", action="store_true", help="with an error")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write the file.

    Raises:
        UsageError: a folder is not a run, a package is missing, the port is in use, or the file exists already.
    """
    from verbatim.inspection.viewer.serve import refuse_without_packages

    refuse_without_packages()
    from verbatim.inspection.viewer.assets import load_assets
    from verbatim.inspection.viewer.run_view import RunView

    log_to_console(PlainConsole(stderr=True), logging.WARNING)
    filters = _filters(args)
    runs = [RunView(folder, model=args.model) for folder in args.runs]
    assets = load_assets()
    if args.export is None:
        asked = [f"--{name}" for name in (*_FILTERS, "breaks", "errors", "trajectories", "sort") if _value(args, name)]
        if asked:
            raise UsageError(f"{asked[0]} is for --export FILE; the page has its own filters")
        run_until_asked(lambda stop: _serve(args, runs, assets, stop))
        return exit_status.FINISHED
    from verbatim.inspection.viewer.export import export

    count = _TRAJECTORIES if args.trajectories is None else args.trajectories
    written = export(runs, assets, args.export, filters=filters, sort=args.sort or "", most=count)
    PlainConsole().print(
        f"wrote {written.trajectories:,} of {written.of_total:,} trajectories to {args.export} "
        f"({written.size / 1e6:.1f} MB)",
        soft_wrap=True,
    )
    for run in runs:
        for problem in run.about()["problems"]:
            print(printable(f"{run.folder}: {problem}"), file=sys.stderr)
    return exit_status.FINISHED


def _value(args: argparse.Namespace, name: str) -> object:
    return getattr(args, name.replace("-", "_"))


def _filters(args: argparse.Namespace) -> dict[str, list[str]]:
    found = {name.replace("-", "_"): [str(value)] for name in _FILTERS if (value := _value(args, name)) is not None}
    return found | {name: ["1"] for name in ("breaks", "errors") if getattr(args, name)}


async def _serve(args: argparse.Namespace, runs: list[RunView], assets: dict[str, Asset], stop: asyncio.Event) -> None:
    """Serve the page until stopped. Without --port, fall back to a free port if the default is in use."""
    from verbatim.inspection.viewer.serve import serve_runs

    async with contextlib.AsyncExitStack() as stack:
        try:
            port = _PORT if args.port is None else args.port
            url = await stack.enter_async_context(serve_runs(runs, assets, port=port))
        except UsageError:
            if args.port is not None:
                raise
            url = await stack.enter_async_context(serve_runs(runs, assets))
        console = PlainConsole()
        console.print(f"{url}  (Ctrl-C ends it)", soft_wrap=True)
        if not args.no_open:
            await asyncio.to_thread(webbrowser.open, url)
        await stop.wait()
