"""Reports a finished run on the console: the learning curve, an episode before and after training, results, paths."""

from __future__ import annotations

import io
import logging
import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verbatim.core.disk import write_file
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import error_text, number
from verbatim.environments.environment import Environment
from verbatim.logs.checkpoints import RunFolder
from verbatim.logs.monitors.learning_curve import Curve, read_curve
from verbatim.logs.monitors.text_curve import ASCII, UNICODE, text_curve
from verbatim.logs.monitors.values import flat
from verbatim.run.before_after import BeforeAfter, compare, print_comparison
from verbatim.run.summary import best_constants

logger = logging.getLogger(__name__)

WIDTH = 79
"""Width of `summary.txt` in columns, and maximum width of the learning curve on a terminal."""


def report(
    summary: Mapping[str, Any], title: str, folder: RunFolder, environments: Mapping[str, Environment], console: Console
) -> None:
    """Print the final results, and store them as `summary.txt`: without colour, `WIDTH` columns wide.

    If a log cannot be read, its part of the report is left out; if the report fails, this is logged. In neither case
    does the run fail: it is over, and its results are in `summary.json`.

    Args:
        summary: The results, as in `summary.json`.
        title: The run's name.
        folder: The run folder, with the logs.
        environments: The evaluated environments by label.
        console: Where to print.
    """
    try:
        _report(summary, title, folder, environments, console)
    except Exception as error:  # this runs user code: an environment's `is_success`
        logger.error(
            "the report of the run could not be made: %s; its results are in %s",
            error_text(error),
            folder.summary,
            exc_info=True,
        )


def _report(
    summary: Mapping[str, Any], title: str, folder: RunFolder, environments: Mapping[str, Environment], console: Console
) -> None:
    """Print the report on the console, and a plain copy of it into `summary.txt`."""
    curve, comparisons = Curve(), list[BeforeAfter]()
    try:
        curve = read_curve(folder.metrics)
        comparisons = compare(folder.path, environments)
    except (UsageError, OSError) as error:
        logger.error("the report is incomplete: %s", error)
    text = PlainConsole(file=io.StringIO(), width=WIDTH)
    for out in (console, text):
        drawn = text_curve(
            curve,
            best_constant=best_constants(environments),
            marks=ASCII if out.options.ascii_only else UNICODE,
            width=min(out.width, WIDTH),
        )
        if drawn:
            out.print(Text(f"\n{title}: learning curve", style="bold"), soft_wrap=True)
            out.print(Text(drawn))
            out.print()
        for comparison in comparisons:
            print_comparison(comparison, out)
            out.print()
        _print_figures(summary, title, out)
    assert isinstance(text.file, io.StringIO)
    try:
        write_file(folder.summary_text, text.file.getvalue().encode())
    except OSError as error:
        logger.error("%s could not be written: %s", folder.summary_text, error.strerror or error)
    kept = {
        "trained model": folder.final,
        "summary": folder.summary,
        "this report": folder.summary_text,
        "learning curve": folder.learning_curve,
    }
    for what, path in kept.items():
        if path.exists():
            console.print(f"{what:<15} {path}", soft_wrap=True)
    console.print(f"{'as a page':<15} verbatim view {shlex.quote(str(folder.path))}", soft_wrap=True)
    best = summary.get("best")
    if best is not None and folder.best.exists():
        figure = f"{best['metric']} {number(best['value'])} after step {best['step']}"
        console.print(f"{'best checkpoint':<15} {folder.best} ({figure})", soft_wrap=True)


def _print_figures(summary: Mapping[str, Any], title: str, console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=f"{title}: results", title_justify="left")
    for key, value in summary.items():
        if key == "environments":
            for env, figures in value.items():
                _add_rows(table, figures, prefix=f"{env}.")
        elif key != "best":
            _add_rows(table, {key: value})
    console.print(table)


def _add_rows(table: Table, figures: Mapping[str, Any], prefix: str = "") -> None:
    for key, value in flat(figures).items():
        if value is not None:
            table.add_row(f"{prefix}{key}", _shown(figures.get(key, value)))


def _shown(value: Any) -> str:
    """
    >>> _shown([-0.0224, 0.0553]), _shown(19611), _shown(40.5)
    ('[-0.022, 0.055]', '19,611', '40.50')
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
