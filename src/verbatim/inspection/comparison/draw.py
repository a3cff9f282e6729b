"""Plots the curves of several runs into one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verbatim.core.disk import replacing, temporary_beside
from verbatim.core.imports import refuse_without
from verbatim.inspection.comparison.compared import RunComparison
from verbatim.inspection.comparison.read_run import Run
from verbatim.run.evaluation.texts import letter

_DRAWN = ("completion_tokens", "entropy", "mismatch_kl", "grad_norm")
"""Step metrics to plot in addition to the comparison's own curves, if any run has them."""


def draw_comparison(comparison: RunComparison, path: Path) -> None:
    """Plot one panel per metric, with one line per run. In the panels of evaluation success, a band shows the interval.

    Args:
        comparison: The comparison to plot.
        path: The PNG file, which is written completely or not at all.

    Raises:
        UsageError: matplotlib is missing.
    """
    refuse_without("matplotlib", extra="plot", what="--plot")
    from matplotlib.figure import Figure

    names = [curves.name for curves in comparison.curves]
    extra = [name for name in _DRAWN if name not in names and any(run.series(name) for run in comparison.runs)]
    panels = [*names, *extra]
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")  # without pyplot and its global state
    for place, name in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        of = name.removeprefix("success of ") if name.startswith("success of ") else None
        if of is not None:
            _draw_evals(axes, comparison.runs, of)
        else:
            for number, run in enumerate(comparison.runs):
                if points := run.series(name):
                    axes.plot(*zip(*points, strict=True), color=f"C{number}", linewidth=1)
        axes.set_title(name, fontsize="medium", parse_math=False)
        axes.set_xlabel("step")
    handles = [figure.axes[0].plot([], [], color=f"C{number}")[0] for number in range(len(comparison.runs))]
    labels = [f"{letter(number)}  {run.folder}" for number, run in enumerate(comparison.runs)]
    legend = figure.legend(handles, labels, loc="outside lower center", fontsize="small")
    for text in legend.get_texts():
        text.set_parse_math(False)
    with replacing(path, temporary=temporary_beside(path)) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _draw_evals(axes: Any, runs: Sequence[Run], env: str) -> None:
    for number, run in enumerate(runs):
        points = run.eval_series(env, "success")
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, "o-", color=f"C{number}", markersize=3, linewidth=1.2)
        low, high = dict(run.eval_series(env, "success/low")), dict(run.eval_series(env, "success/high"))
        known = [step for step in steps if step in low and step in high]
        axes.fill_between(
            known,
            [low[step] for step in known],
            [high[step] for step in known],
            color=f"C{number}",
            alpha=0.15,
            linewidth=0,
        )
    axes.set_ylim(-0.03, 1.03)
