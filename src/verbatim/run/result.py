"""Defines the result of a run that was started from Python: folder, summary, metrics as columns, model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import UsageError
from verbatim.logs.monitors.metrics_log import read_history

STEP = "step"
"""The name of the column of step numbers."""


class MetricColumns(dict[str, NDArray[Any]]):
    """Logged metrics as columns: `metrics["reward/mean"]` is float64 [num_records], with NaN where a record lacks the
    metric; `metrics["step"]` is int64 [num_records].

    >>> columns = MetricColumns([(1, {"loss": 0.5}), (2, {"loss": "NaN", "lr": 0.1})])
    >>> columns["step"].tolist(), columns["loss"].tolist(), columns["lr"].tolist()
    ([1, 2], [0.5, nan], [nan, 0.1])

    Args:
        records: The step and the metrics of each record, in order; a value is a number, "NaN", "Infinity" or
            "-Infinity".
    """

    def __init__(self, records: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        rows = list(records)
        names = dict.fromkeys(name for _, metrics in rows for name in metrics)
        super().__init__({STEP: np.array([step for step, _ in rows], dtype=np.int64)})
        for name in names:
            self[name] = np.array([float(metrics.get(name, "nan")) for _, metrics in rows], dtype=np.float64)

    def __repr__(self) -> str:
        return f"<{len(self[STEP])} records of {len(self) - 1} metrics: {', '.join(list(self)[1:6])}, ...>"

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with one row per record, indexed by step.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UsageError(
                "to_pandas() needs the package pandas: pip install pandas. Without it every column is a "
                'numpy array: metrics["reward/mean"]'
            ) from None
        return pandas.DataFrame(self).set_index(STEP)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunResult:
    """A run that has completed all its steps."""

    folder: Path
    """The run folder, absolute."""
    summary: Mapping[str, Any]
    """The contents of `summary.json`: `success_before_rl`, `steps`, `trained_tokens`, ..."""
    metrics: MetricColumns = field(repr=False)
    """One record per step."""
    evals: Mapping[str, MetricColumns] = field(repr=False)
    """One record per evaluation, by environment; `step` is the number of steps trained before the evaluation."""
    model_path: Path
    """The trained model, a folder that `from_pretrained` loads."""
    again: Callable[..., RunResult] = field(repr=False)
    """Resumes the run with the configuration stored in its folder; takes the arguments of `resume`."""

    def resume(self, **settings: Any) -> RunResult:
        """Continue the run in its folder, usually for more steps: `result.resume(max_steps=200)`.

        Args:
            settings: Keys to change, as for `verbatim.run`, and the arguments `monitors` and `quiet` of `verbatim.run`.
                The run keeps the environments with which it was started.

        Raises:
            UsageError: as for `verbatim.run`; also if `settings` change the model.
        """
        return self.again(**settings)


def read_result(folder: Path, summary: Mapping[str, Any], again: Callable[..., RunResult]) -> RunResult:
    """The result of a finished run, with the metrics read from its folder."""
    steps, evals = read_history(folder / "metrics.jsonl")
    return RunResult(
        folder=folder,
        summary=summary,
        metrics=MetricColumns(steps),
        evals={env: MetricColumns(rows) for env, rows in evals.items()},
        model_path=folder / "final",
        again=again,
    )
