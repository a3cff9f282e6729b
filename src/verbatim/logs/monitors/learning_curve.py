"""Draws a run's learning curve as a PNG, from its metrics log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verbatim.core.disk import replacing
from verbatim.core.imports import is_installed, refuse_without
from verbatim.logs.monitors.metrics_log import Rows, read_history
from verbatim.logs.monitors.monitor import Metrics, Monitor

logger = logging.getLogger(__name__)


Points = list[tuple[int, float]]
"""Pairs of step and value."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of a learning curve."""

    rewards: Points = field(default_factory=list)
    """Mean training reward of each step."""
    evals: dict[str, Points] = field(default_factory=dict)
    """Success of each evaluation, by environment; step 0 is before training."""
    successes: Points = field(default_factory=list)
    """Training success of each step; empty if success equals the reward."""
    eval_rewards: dict[str, Points] = field(default_factory=dict)
    """Mean reward of each evaluation, by environment; empty if the reward equals success."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels to draw: one for reward and one for success, or a single panel if reward and success are equal
        everywhere."""
        success = Panel(name="success", train=self.successes, evals=self.evals)
        is_share = all(0 <= value <= 1 for _, value in self.rewards if math.isfinite(value))
        if is_share and not self.eval_rewards and not self.successes:
            return (replace(success, train=self.rewards, train_name="reward"),)
        return Panel(name="reward", train=self.rewards, evals=self.eval_rewards), success


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One metric, in training and in evaluations."""

    name: str
    """"reward" or "success"."""
    train: Points
    """Points of training."""
    evals: Mapping[str, Points]
    """Points of evaluations, by environment."""
    train_name: str = ""
    """The metric's name in training; empty if the name in training is also `name`."""


def read_curve(metrics_path: Path) -> Curve:
    """Read the curve of a run from the file of its `MetricsLog`.

    Raises:
        UsageError: there is no such file, or it is not a metrics log.
    """
    steps, evals = read_history(metrics_path)
    is_success = all(reward_is_success(metrics) for rows in (steps, *evals.values()) for _, metrics in rows)
    return Curve(
        rewards=_points(steps, "reward/mean"),
        evals=_points_by_env(evals, "success"),
        successes=[] if is_success else _points(steps, "success"),
        eval_rewards={} if is_success else _points_by_env(evals, "reward/mean"),
    )


def _points(rows: Rows, name: str) -> Points:
    return [(step, float(metrics[name])) for step, metrics in rows if name in metrics]


def _points_by_env(evals: Mapping[str, Rows], name: str) -> dict[str, Points]:
    found = {env: _points(rows, name) for env, rows in evals.items()}
    return {env: points for env, points in found.items() if points}


def reward_is_success(metrics: Mapping[str, Any]) -> bool:
    """True if the mean reward of a step or an evaluation equals its success, which is the case if each reward is 1 for
    a successful episode and 0 otherwise. Failed episodes of an evaluation are unsuccessful but have no reward, so the
    comparison corrects for them.

    >>> reward_is_success({"success": 0.5, "reward/mean": 0.625, "episodes": 10, "failed": 2})
    True
    >>> reward_is_success({"success": 0.5, "reward/mean": 0.7})
    False
    """
    reward, success = (float(metrics.get(name, "nan")) for name in ("reward/mean", "success"))
    ended = 1 - float(metrics.get("failed", 0)) / max(1.0, float(metrics.get("episodes", 1)))
    # Also True if the reward or the success is NaN, because then there is only one value to show.
    return not abs(reward * ended - success) > 1e-6


def reward_parts(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The means of the named reward parts of an evaluation, by name.

    >>> reward_parts({"reward_part/style/mean": 0.5, "reward_part/style/std": 0.1, "reward/mean": 0.7})
    {'style': 0.5}
    """
    means = {name: value for name, value in metrics.items() if name.startswith("reward_part/")}
    return {
        name.removeprefix("reward_part/").removesuffix("/mean"): float(value)
        for name, value in means.items()
        if name.endswith("/mean")
    }


def draw_curve(curve: Curve, path: Path, *, title: str = "", best_constant: Mapping[str, float] | None = None) -> None:
    """Draw training, evaluations (with labels at the first and the last), and the best constant policy. If reward and
    success differ, each has its own axes.

    Args:
        curve: The points; NaN leaves a gap.
        path: The PNG, which is written atomically.
        title: The title above the axes.
        best_constant: Success of the best policy that ignores its observations, by environment; drawn as a dashed line.

    Raises:
        UsageError: matplotlib is not installed.
    """
    refuse_without("matplotlib", extra="plot", what="a learning curve")
    from matplotlib.figure import Figure

    panels = curve.panels
    # Without pyplot, which has global state.
    figure = Figure(figsize=(8, 4.5 if len(panels) == 1 else 7.5), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], strict=True):
        _draw_panel(axes, panel, best_constant or {} if panel.name == "success" else {})
    figure.axes[-1].set(xlabel="step")
    figure.axes[0].set_title(title, parse_math=False)  # a run's name may contain a $
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


class LearningCurve(Monitor):
    """Draws the curve after each evaluation and at the end. It is not drawn after each step, because that takes as long
    as a small step. Without matplotlib, one warning is logged and nothing is drawn."""

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
        """Draw the curve from the metrics log. The `MetricsLog` is called before this monitor, so the evaluation is
        already in the log."""
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.available and self.metrics_path.is_file():
            draw_curve(read_curve(self.metrics_path), self.path, title=self.title, best_constant=self.best_constant)


def _draw_panel(axes: Any, panel: Panel, constants: Mapping[str, float]) -> None:
    if panel.train:
        steps, values = zip(*panel.train, strict=True)
        axes.plot(steps, values, color="tab:gray", linewidth=1, label=f"training {panel.train_name or panel.name}")
    for index, env in enumerate(sorted({*panel.evals, *constants})):
        if env in panel.evals:
            points, color = panel.evals[env], f"C{index}"
            axes.plot(
                *zip(*points, strict=True), "o-", color=color, markersize=4, linewidth=1.5, label=f"{env}: {panel.name}"
            )
            for name, point in (("before", points[0]), ("after", points[-1]))[: len(points)]:
                axes.plot(*point, "o", color=color, markersize=9, fillstyle="none")
                axes.annotate(f"{name}: {point[1]:.2f}", point, textcoords="offset points", xytext=(0, 9), ha="center")
        if env in constants:
            axes.axhline(
                constants[env],
                color=f"C{index}",
                linestyle="--",
                linewidth=1,
                label=f"{env}: best constant policy, {constants[env]:.2f}",
            )
    axes.margins(x=0.08, y=0.12)  # room for the labels of the first and last point
    axes.set(ylabel="success, reward" if panel.train_name else panel.name)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small")
