"""Draws the learning curve of a run as one PNG, from its metrics log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.core.imports import is_installed, refuse_without
from verbatim.logs.monitors.base import Metrics, Monitor
from verbatim.logs.monitors.metrics_log import read_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What is drawn."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean training reward) of every step."""
    evals: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """(step, success) of every evaluation, by environment; step 0 is before training."""


def read_curve(metrics_path: Path) -> Curve:
    """The curve of a `MetricsLog`.

    Raises:
        UsageError: no such file, or not a metrics log.
    """
    curve = Curve()
    for record in read_metrics(metrics_path):
        metrics = record["metrics"]
        if record["kind"] == "train" and "reward/mean" in metrics:
            curve.rewards.append((record["step"], float(metrics["reward/mean"])))
        elif record["kind"] == "eval" and "success" in metrics:
            curve.evals.setdefault(record["env"], []).append((record["step"], float(metrics["success"])))
    return curve


def draw_curve(curve: Curve, path: Path, *, title: str = "", best_constant: Mapping[str, float] | None = None) -> None:
    """Training reward, evaluations with the first and the last one marked, and what a constant policy can reach.

    Args:
        curve: The points; NaN leaves a gap.
        path: The PNG; written whole or not at all.
        title: Above the axes.
        best_constant: Success of the best policy that ignores what it observes, by environment: a dashed line.

    Raises:
        UsageError: matplotlib is missing.
    """
    refuse_without("matplotlib", extra="plot", what="a learning curve")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")  # no pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if curve.rewards:
        steps, rewards = zip(*curve.rewards, strict=True)
        axes.plot(steps, rewards, color="tab:gray", linewidth=1, label="training reward")
    constants = best_constant or {}
    for index, env in enumerate(sorted({*curve.evals, *constants})):
        if env in curve.evals:
            _draw_evals(axes, env, curve.evals[env], f"C{index}")
        if env in constants:
            axes.axhline(
                constants[env],
                color=f"C{index}",
                linestyle="--",
                linewidth=1,
                label=f"{env}: best constant policy, {constants[env]:.2f}",
            )
    axes.margins(x=0.08, y=0.12)  # room for the words at the first and the last point
    axes.set(xlabel="step", ylabel="reward, success")
    axes.set_title(title, parse_math=False)  # a name may hold a $
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


class LearningCurve(Monitor):
    """Draws the curve after every evaluation and at the end: a drawing costs as much as a small step. Without
    matplotlib it says so once and draws nothing."""

    def __init__(
        self, metrics_path: Path, path: Path, *, title: str = "", best_constant: Mapping[str, float] | None = None
    ) -> None:
        self.metrics_path, self.path = metrics_path, path
        self.title, self.best_constant = title, best_constant
        self.available = is_installed("matplotlib")
        if not self.available:
            install = "pip install 'verbatim-rl[plot]'"
            logger.warning("no %s for this run: matplotlib is not installed; type: %s", path.name, install)

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """Draw again, from the log: listed after the `MetricsLog`, this evaluation is in it."""
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.available and self.metrics_path.is_file():
            draw_curve(read_curve(self.metrics_path), self.path, title=self.title, best_constant=self.best_constant)


def _draw_evals(axes: Any, env: str, points: list[tuple[int, float]], color: str) -> None:
    steps, success = zip(*points, strict=True)
    axes.plot(steps, success, "o-", color=color, markersize=4, linewidth=1.5, label=f"{env}: success")
    for name, point in (("before", points[0]), ("after", points[-1]))[: len(points)]:
        axes.plot(*point, "o", color=color, markersize=9, fillstyle="none")
        axes.annotate(f"{name}: {point[1]:.2f}", point, textcoords="offset points", xytext=(0, 9), ha="center")
