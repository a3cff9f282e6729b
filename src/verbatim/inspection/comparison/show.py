"""Prints a comparison of runs to the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text

from verbatim.inspection.comparison.compared import RunComparison, state_line
from verbatim.inspection.comparison.configs import told
from verbatim.inspection.comparison.evals import ComparedEvals
from verbatim.inspection.comparison.figures import Figures
from verbatim.inspection.comparison.read_run import alarm_counts
from verbatim.inspection.comparison.text_plot import COLOURS, SEVERAL, text_plot
from verbatim.logs.monitors.console import format_number
from verbatim.run.evaluation.rows import Row
from verbatim.run.evaluation.show import print_rows, show_differences, show_results
from verbatim.run.evaluation.texts import letter

_WIDEST = 100
"""Maximum width of a plot in columns."""
_LONGEST_VALUE = 60
"""Maximum length of a configuration value in characters."""


def show_comparison(comparison: RunComparison, console: Console) -> None:
    """Print the whole comparison, with one column per run."""
    letters = [letter(place) for place in range(len(comparison.runs))]
    _show_runs(comparison, console)
    _heading("configuration", console)
    rows = [
        (each.key, *(_value(value, each.is_default(place)) for place, value in enumerate(each.values)))
        for each in told(comparison.settings)
    ]
    if rows:
        print_rows(letters, rows, console)
    else:
        console.print("the same in all runs")
    for each in comparison.curves:
        plot = text_plot(each.series, width=min(console.width, _WIDEST))
        if plot is not None:
            _heading(f"{each.name} ({SEVERAL}: several runs)", console)
            console.print(plot)
    for evals in comparison.evals:
        _show_evals(evals, letters, console)
    for table in comparison.figures:
        if table.rows:
            _heading(table.title, console)
            print_rows(letters, [_figure_row(name, list(values), table) for name, values in table.rows], console)
    _show_alarms(comparison, letters, console)


def _show_runs(comparison: RunComparison, console: Console) -> None:
    for place, run in enumerate(comparison.runs):
        style = f"bold {COLOURS[place % len(COLOURS)]}"
        console.print(Text.assemble((letter(place), style), f"  {run.folder}"), soft_wrap=True)
        console.print(Text(f"   {run.name}: {state_line(run)}"))
        for change in run.forked_from.changes if run.forked_from is not None else ():
            console.print(Text(f"   changed by the fork: {change}"))
        for change in run.changed:
            console.print(Text(f"   changed by a resume: {change}"))
        for problem in run.problems:
            console.print(Text(f"   {problem}", style="yellow"))
    for problem in comparison.problems:
        console.print(Text(problem, style="yellow"))


def _heading(text: str, console: Console) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _value(value: Any, is_default: bool) -> str:
    text = "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
    return f"{text} (default)" if is_default else text


def _show_evals(evals: ComparedEvals, letters: list[str], console: Console) -> None:
    if evals.at == "shared":
        _heading(f"{evals.env}: evaluation after step {evals.steps[0]}, which all runs have", console)
    else:
        when = ", ".join(
            f"{name} after step {step}" for name, step in zip(letters, evals.steps, strict=True) if step is not None
        )
        _heading(f"{evals.env}: last evaluation ({when}); 95% intervals over examples", console)
        show_results(list(zip(letters, evals.results, strict=True)), console)
    show_differences(evals.pairs, evals.env, console)
    if without := [name for name, result in zip(letters, evals.results, strict=True) if result and not result.examples]:
        console.print(
            Text(
                f"{', '.join(without)}: the episodes were not kept (monitor.save_trajectories), so they "
                "cannot be compared pairwise",
                style="dim",
            )
        )


def _figure_row(name: str, values: list[float], table: Figures) -> Row:
    if not table.are_shares:
        return (
            name,
            *(f"{value:,.0f}" if value.is_integer() and abs(value) >= 10 else format_number(value) for value in values),
        )
    return (name, *("-" if math.isnan(value) else f"{value:.1%}" for value in values))


def _show_alarms(comparison: RunComparison, letters: list[str], console: Console) -> None:
    counts = [alarm_counts(run) for run in comparison.runs]
    names = dict.fromkeys(name for each in counts for name in each)
    _heading("alarms", console)
    if not names:
        console.print("none")
        return

    def cell(found: tuple[int, bool] | None) -> str:
        return "-" if found is None else f"{found[0]}{', still raised' if found[1] else ''}"

    print_rows(letters, [(name, *(cell(each.get(name)) for each in counts)) for name in names], console)
