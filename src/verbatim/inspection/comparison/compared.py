"""Compares several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.inspection.comparison.configs import ConfigDifference, config_differences
from verbatim.inspection.comparison.evals import ComparedEvals, compare_evals
from verbatim.inspection.comparison.figures import Figures, figures
from verbatim.inspection.comparison.read_run import Run, alarm_counts, read_run
from verbatim.inspection.comparison.text_plot import Series
from verbatim.run.evaluation.as_json import difference_to_json, finite, result_to_json
from verbatim.run.evaluation.texts import letter

REWARD = "reward/mean"
"""The step metric that is always plotted."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of one metric, one per run."""

    name: str
    """The name of the metric. For evaluations, it includes the environment, for example `success of guess_number`."""
    series: Sequence[Series]
    """One series per run. The series of a run without the metric is empty."""


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs, and the results of comparing them."""

    runs: Sequence[Run]
    settings: Sequence[ConfigDifference]
    """The configuration keys whose values differ between runs."""
    curves: Sequence[Curves]
    evals: Sequence[ComparedEvals]
    figures: Sequence[Figures]
    problems: Sequence[str]
    """Descriptions of what could not be read, in addition to each run's own `problems`."""


def compare_runs(folders: Sequence[Path], metrics: Sequence[str] = ()) -> RunComparison:
    """Read the runs and compare them.

    Args:
        folders: Run folders, at least two.
        metrics: Names of additional step metrics to include in the curves and tables.

    Raises:
        UsageError: there are fewer than two runs, a run is given twice, a folder has no run, or a metric is in no run.
    """
    if len(folders) < 2:
        raise UsageError("verbatim compare needs at least two runs: verbatim compare runs/NAME/FIRST runs/NAME/SECOND")
    resolved: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in resolved:
            raise UsageError(f"{folder} and {resolved[folder.resolve()]} are the same run; name a different one")
        resolved[folder.resolve()] = folder
    runs = [read_run(folder) for folder in folders]
    there = {name for run in runs for metrics_of in run.steps.values() for name in metrics_of}
    for name in metrics:
        if name not in there:
            raise UsageError(
                f"no step of these runs has the metric {name!r}; they have {', '.join(sorted(there)[:20])}"
                f"{', ...' if len(there) > 20 else ''}"
            )
    problems: list[str] = []
    return RunComparison(
        runs=runs,
        settings=config_differences(runs),
        curves=_curves(runs, metrics),
        evals=compare_evals(runs, problems),
        figures=figures(runs, metrics),
        problems=problems,
    )


def _curves(runs: Sequence[Run], metrics: Sequence[str]) -> list[Curves]:
    found = [Curves(name=name, series=[run.series(name) for run in runs]) for name in dict.fromkeys([REWARD, *metrics])]
    for env in dict.fromkeys(env for run in runs for env in run.evals):
        found.append(Curves(name=f"success of {env}", series=[run.eval_series(env, "success") for run in runs]))
    return [curves for curves in found if any(curves.series)]


def comparison_to_json(comparison: RunComparison) -> dict[str, Any]:
    """Convert the whole comparison to plain JSON values, in which runs are named by their letters."""
    letters = [letter(place) for place in range(len(comparison.runs))]

    def by_letter(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(letters, values, strict=True))

    found: Mapping[str, Any] = {
        "runs": [
            {
                "letter": name,
                "folder": str(run.folder),
                "name": run.name,
                "state": run.state,
                "steps": run.last_step,
                "max_steps": run.max_steps,
                "starts": run.num_starts,
                "changed_on_resume": list(run.changed),
                "forked_from": None if run.forked_from is None else run.forked_from.in_short(),
                "alarms": {
                    what: {"raised": count, "still": still} for what, (count, still) in alarm_counts(run).items()
                },
                "problems": list(run.problems),
            }
            for name, run in zip(letters, comparison.runs, strict=True)
        ],
        "config": [
            {"key": each.key, "default": each.default, "values": by_letter(each.values), "lines": by_letter(each.lines)}
            for each in comparison.settings
        ],
        "curves": {
            each.name: by_letter([[list(point) for point in one] for one in each.series]) for each in comparison.curves
        },
        "evaluations": [
            {
                "env": each.env,
                "at": each.at,
                "steps": by_letter(each.steps),
                "results": by_letter([result and result_to_json(result) for result in each.results]),
                "pairs": [
                    {"before": pair.before, "after": pair.after, **difference_to_json(pair.environments[each.env])}
                    for pair in each.pairs
                ],
            }
            for each in comparison.evals
        ],
        "figures": {each.title: {name: by_letter(values) for name, values in each.rows} for each in comparison.figures},
        "problems": list(comparison.problems),
    }
    value: dict[str, Any] = finite(found)
    return value


def state_line(run: Run) -> str:
    """The state and progress of a run, on one line.

    Example: `finished, 210 of 210 steps`, `stopped, 40 of 210 steps, resumed 2 times`.
    """
    parts = [run.state, f"{run.last_step} of {run.max_steps if run.max_steps is not None else '?'} steps"]
    if run.num_starts > 1:
        parts.append("resumed once" if run.num_starts == 2 else f"resumed {run.num_starts - 1} times")
    if run.forked_from is not None:
        parts.append(f"forked from {run.forked_from.run} after step {run.forked_from.step}")
    if run.seconds is not None and not math.isnan(run.seconds):
        parts.append(f"{run.seconds:,.0f} s")
    return ", ".join(parts)
