"""Draws the learning curves of several named runs into one figure.

    python benchmarks/curves.py "embedded sampler=runs/guess_number/latest" \
        "vLLM=runs/guess_number_vllm/latest" --out benchmarks/notes/guess_number_vllm.png

Runs with the same name (for example with different seeds) have the same color. Prints one JSON line: for each name, the
number of steps of each of its runs, and the success in the first and the last evaluation of each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from verbatim.logs.monitors.learning_curve import Curve, read_curve

SMOOTHED = 15
"""Number of batches over which each point of a curve is averaged."""


def smoothed(curve: Curve) -> list[tuple[int, float]]:
    """The pairs of (step, mean reward of the last `SMOOTHED` steps up to this step)."""
    rewards = [reward for _, reward in curve.rewards]
    width = min(SMOOTHED, len(rewards))
    return [(i, statistics.fmean(rewards[i - width : i])) for i in range(width, len(rewards) + 1)]


def success(curve: Curve) -> tuple[float, float]:
    """The success in the first and in the last evaluation."""
    (points,) = curve.evals.values()
    return points[0][1], points[-1][1]


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw the smoothed training reward as one line per run, with a dot for the last evaluation at its end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, runs) in enumerate(curves.items()):
        for number, curve in enumerate(runs):
            steps, rewards = zip(*smoothed(curve), strict=True)
            label = name if number == 0 else None
            axes.plot(steps, rewards, color=f"C{index}", linewidth=1.2, label=label)
            axes.plot(len(curve.rewards), success(curve)[1], "o", color=f"C{index}", markersize=5)
    axes.set(
        xlabel="step",
        ylabel=f"training reward, mean of {SMOOTHED} steps",
        ylim=(0, 1.02),
        title="guess_number; dots: success in the last evaluation",
    )
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120, format="png")


def main() -> None:
    """Read the runs, draw the figure, and print the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    curves: dict[str, list[Curve]] = {}
    for name, folder in (run.split("=", 1) for run in args.runs):
        curves.setdefault(name, []).append(read_curve(Path(folder) / "metrics.jsonl"))
    draw(curves, args.out)
    found = {
        name: {"steps": [len(c.rewards) for c in runs], "success": [success(c) for c in runs]}
        for name, runs in curves.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
