"""Computes the figures to compare between runs: metrics of the last steps, speed, and the ledger."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verbatim.inspection.comparison.read_run import Run

LAST = 10
"""Number of steps at the end of a run over which figures are averaged."""
_FINAL = (
    "reward/mean",
    "success",
    "completion_tokens",
    "turns",
    "valid_format",
    "rollouts/failed_share",
    "loss",
    "entropy",
    "mismatch_kl",
    "ref_kl",
    "grad_norm",
    "lr",
    "staleness/mean",
)
_SPEED = {
    "tokens_per_second": "trainer tokens/s",
    "sampler/tokens_per_second": "sampler tokens/s",
    "time/sampler_idle": "sampler idle, s",
    "time/trainer_idle": "trainer idle, s",
}
"""The display name of each speed metric."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One table. Each row has a name and one value per run, which is NaN if the run has no value."""

    title: str
    rows: Sequence[tuple[str, Sequence[float]]]
    are_shares: bool = False
    """True if the values are shares between 0 and 1."""


def figures(runs: Sequence[Run], metrics: Sequence[str] = ()) -> list[Figures]:
    """The tables of final metrics, speed and ledger.

    Args:
        runs: The runs to compare.
        metrics: Names of additional step metrics to include.
    """
    names = list(dict.fromkeys([*_FINAL, *metrics]))
    means = [(name, functools.partial(last_mean, metric=name)) for name in names]
    return [
        _table(f"mean of the last {LAST} steps", runs, means),
        _table(
            f"speed, rates of the last {LAST} steps",
            runs,
            [
                ("steps", lambda run: float(run.last_step)),
                ("seconds", _seconds),
                ("seconds per step", seconds_per_step),
                *((shown, functools.partial(last_mean, metric=name)) for name, shown in _SPEED.items()),
                ("sampled tokens", lambda run: _at_end(run, "ledger/sampled")),
            ],
        ),
        _ledger(runs),
    ]


def _table(title: str, runs: Sequence[Run], asked: Sequence[tuple[str, Callable[[Run], float]]]) -> Figures:
    """Make a table. Rows for which no run has a value are left out."""
    rows = [(name, [value(run) for run in runs]) for name, value in asked]
    return Figures(title=title, rows=[row for row in rows if any(not math.isnan(value) for value in row[1])])


def last_mean(run: Run, metric: str) -> float:
    """The mean of a metric over the last `LAST` of the run's steps that have the metric; NaN if no step has the
    metric."""
    values = [value for _, value in run.series(metric)[-LAST:]]
    return statistics.fmean(values) if values else math.nan


def seconds_per_step(run: Run) -> float:
    """The median time from one step to the next.

    The median is used because evaluations, checkpoints and the pause before a resume would distort the mean.
    """
    steps = [step for step in sorted(run.times) if step - 1 in run.times]
    gaps = [run.times[step] - run.times[step - 1] for step in steps]
    return statistics.median(gaps) if gaps else math.nan


def _seconds(run: Run) -> float:
    """The duration in seconds that the run reports. For an unfinished run, the time from its first to its last logged
    step."""
    if run.seconds is not None:
        return run.seconds
    return max(run.times.values()) - min(run.times.values()) if len(run.times) > 1 else math.nan


def _at_end(run: Run, metric: str) -> float:
    return run.steps[run.last_step].get(metric, math.nan) if run.steps else math.nan


def _ledger(runs: Sequence[Run]) -> Figures:
    """A table of what had become of each run's sampled tokens at the run's end, as shares of all its sampled tokens."""
    first = ("ledger/trained", "ledger/pending", "ledger/masked_by_loss")
    dropped = sorted(
        {name for run in runs if run.steps for name in run.steps[run.last_step] if name.startswith("ledger/dropped/")}
    )
    rows = []
    for name in (*first, *dropped):
        values = [_at_end(run, name) / (_at_end(run, "ledger/sampled") or math.nan) for run in runs]
        if any(value > 0 for value in values):
            rows.append((name.removeprefix("ledger/").replace("/", ": "), values))
    return Figures(title="what became of the sampled tokens", rows=rows, are_shares=True)
