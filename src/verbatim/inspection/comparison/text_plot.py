"""Plots the curves of several runs as text, with a letter for each run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from verbatim.core.texts import number
from verbatim.logs.monitors.text_curve import column_means
from verbatim.run.evaluation.texts import letter

Series = Sequence[tuple[int, float]]
"""(step, value) pairs."""

COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
SEVERAL = "*"
"""The character for a cell that contains points of several runs."""


def text_plot(series: Sequence[Series], *, width: int = 79, height: int = 11) -> Text | None:
    """Plot the runs over a common step axis. For each run, each column shows the mean of those values whose steps fall
    into the column.

    Args:
        series: The points of each run, in the order of the runs' letters; a run may have no points.
        width: Width in columns, including labels; values below 40 count as 40.
        height: Height in rows, without the step axis.

    Returns:
        The plot, with lines of at most `width` columns; None if there are no points.
    """
    points = [point for each in series for point in each]
    if not points:
        return None
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    if high == low:
        low, high = low - 0.5, high + 0.5
    labels = [number(high - (high - low) * row / (height - 1)) for row in range(height)]
    margin = max(map(len, labels))
    columns = max(40, width) - margin - 2
    cells: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(height)]
    for place, each in enumerate(series):
        for column, value in column_means(each, (first, last), columns):
            row = round((high - value) / (high - low) * (height - 1))
            taken = cells[row][column][0]
            mark = letter(place)[0] if taken in (" ", letter(place)[0]) else SEVERAL
            cells[row][column] = (mark, COLOURS[place % len(COLOURS)] if mark != SEVERAL else "bold")
    text = Text()
    for row in range(height):
        label = labels[row] if row % 5 == 0 or row == height - 1 else ""
        text.append(f"{label:>{margin}} |", style="dim")
        for mark, style in cells[row]:
            text.append(mark, style=style)
        text.append("\n")
    text.append(" " * (margin + 1) + "+" + "-" * columns + "\n", style="dim")
    begin, end = f"step {first}", str(last)
    text.append(" " * (margin + 2) + begin.ljust(columns - len(end)) + (end if last > first else ""), style="dim")
    return text
