"""Draws a run's learning curve as text for terminals, without colour and by default 79 columns wide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from verbatim.core.texts import number
from verbatim.logs.monitors.learning_curve import Curve, Panel

Point = tuple[int, float]
"""A pair of step and value."""

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_TICKS = 3
"""Number of rows between two labels of the y axis."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The characters of a plot."""

    evals: str
    """Marks of evaluations, one per environment. They are reused if there are more environments."""
    constant: str
    """The character of the line of the best constant policy."""
    axes: tuple[str, str, str, str]
    """Characters of the y axis at a label, of the y axis elsewhere, of the corner, and of the x axis."""
    line: str | None
    """The character of the training curve; None for braille characters, each of which has two columns and four rows of
    dots."""


UNICODE = Marks(evals="●▲■◆", constant="┄", axes=("┤", "│", "└", "─"), line=None)
ASCII = Marks(evals="OX#@", constant="-", axes=("+", "|", "+", "-"), line=".")


def text_curve(
    curve: Curve,
    *,
    best_constant: Mapping[str, float] | None = None,
    marks: Marks = UNICODE,
    width: int = 79,
    height: int = 13,
) -> str:
    """Draw a plot with training as a curve, evaluations as marks, and the best constant policy as a dashed line.

    If reward and success differ, each has its own plot. Values that are not finite are left out. If there are no finite
    values, the text is empty.

    Args:
        curve: The points.
        best_constant: As for `learning_curve.draw_curve`.
        marks: The characters to use; `ASCII` for terminals without Unicode.
        width: Number of columns, including labels; at least 40.
        height: Number of rows of each plot, without the x axis.

    Returns:
        Lines of at most `width` columns, and the legend.
    """
    panels = [
        replace(
            panel, train=_finite(panel.train), evals={env: _finite(panel.evals[env]) for env in sorted(panel.evals)}
        )
        for panel in curve.panels
    ]
    steps = [step for panel in panels for points in (panel.train, *panel.evals.values()) for step, _ in points]
    if not steps:
        return ""
    frame = _Frame(marks=marks, width=max(40, width), height=height, steps=(min(steps), max(steps)))
    return "\n\n".join(
        frame.drawn(panel, best_constant or {} if panel.name == "success" else {})
        for panel in panels
        if panel.train or any(panel.evals.values())
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The size and the x range of all plots."""

    marks: Marks
    width: int
    height: int
    steps: tuple[int, int]

    def drawn(self, panel: Panel, best_constant: Mapping[str, float]) -> str:
        """A plot with its axes and legend. The y axis ranges from 0 to 1, and further if a value is outside of that
        range."""
        evals = {env: points for env, points in panel.evals.items() if points}
        constants = {env: value for env, value in best_constant.items() if env in evals}
        values = [value for points in (panel.train, *evals.values()) for _, value in points]
        low, high = (0.0, 1.0) if all(0 <= value <= 1 for value in values) else (min(values), max(values))
        high = high if high > low else low + 1
        labels = [_label(high - (high - low) * row / (self.height - 1)) for row in range(self.height)]
        margin = max(map(len, labels)) + 1
        columns = self.width - margin - 2

        def row_of(value: float) -> int:
            return round((high - min(max(value, low), high)) / (high - low) * (self.height - 1))

        cells = [[" "] * columns for _ in range(self.height)]
        for value in constants.values():
            cells[row_of(value)] = [self.marks.constant] * columns
        self._draw_line(cells, panel.train, low, high)
        for mark, points in zip(itertools.cycle(self.marks.evals), evals.values(), strict=False):
            for step, value in points:
                cells[row_of(value)][_column(step, self.steps, columns)] = mark
        labelled, plain, corner, bottom = self.marks.axes
        lines = [
            f"{labels[row] if row % _TICKS == 0 else '':>{margin}} {labelled if row % _TICKS == 0 else plain}"
            + "".join(cells[row]).rstrip()
            for row in range(self.height)
        ]
        lines.append(" " * (margin + 1) + corner + bottom * columns)
        lines.append(" " * (margin + 2) + self._step_labels(columns))
        return "\n".join([*lines, *self._legend(panel, evals, constants, margin)])

    def _draw_line(self, cells: list[list[str]], points: Sequence[Point], low: float, high: float) -> None:
        """Draw a line that passes, in each column of dots, through the mean of the points in that column."""
        across, down = (2, 4) if self.marks.line is None else (1, 1)
        columns, rows = across * len(cells[0]), down * self.height
        means = column_means(points, self.steps, columns)
        # As for marks, `high` is at the centre of the first row of cells, and `low` at the centre of the last row.
        dots = [(x, (high - mean) / (high - low) * (rows - down) + (down - 1) // 2) for x, mean in means]
        for x, y in _joined(dots):
            row, column = y // down, x // across
            if self.marks.line is not None:
                cells[row][column] = self.marks.line
            else:
                before = ord(cells[row][column])
                drawn = before if before >= _BRAILLE and before < _BRAILLE + 256 else _BRAILLE
                cells[row][column] = chr(drawn | _DOTS[y % down][x % across])

    def _step_labels(self, columns: int) -> str:
        first, last = self.steps
        if first == last:
            return f"step {first}"
        left, middle, right = f"step {first}", str(round((first + last) / 2)), str(last)
        start = (columns - len(middle)) // 2
        return f"{left:<{start}}{middle}".ljust(columns - len(right)) + right

    def _legend(
        self,
        panel: Panel,
        evals: Mapping[str, Sequence[Point]],
        constants: Mapping[str, float],
        margin: int,
    ) -> list[str]:
        indent = " " * (margin + 2)
        found = []
        if panel.train:
            line = self.marks.line * 2 if self.marks.line is not None else "⠤⠒"
            first, last = (number(panel.train[place][1]) for place in (0, -1))
            name = panel.train_name or panel.name
            found.append(f"{indent}{line} training {name} of the steps: first {first}, last {last}")
        for mark, (env, points) in zip(itertools.cycle(self.marks.evals), evals.items(), strict=False):
            values = ", ".join(f"{number(value)} after step {step}" for step, value in points[:: len(points) - 1 or 1])
            found.append(f"{indent}{mark}  {env}: {panel.name} {values}")
        found += [
            f"{indent}{self.marks.constant * 2} {env}: best constant policy, {number(value)}"
            for env, value in constants.items()
        ]
        return found


def _column(step: int, steps: tuple[int, int], columns: int) -> int:
    first, last = steps
    return round((step - first) / max(1, last - first) * (columns - 1))


def column_means(points: Sequence[Point], steps: tuple[int, int], columns: int) -> list[Point]:
    """For each column that has points, its number and the mean of its points. The columns divide the range from the
    first to the last of `steps` evenly.

    >>> column_means([(1, 0.0), (2, 1.0), (9, 3.0)], (1, 9), 3)
    [(0, 0.5), (2, 3.0)]
    """
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault(_column(step, steps, columns), []).append(value)
    return [(column, sum(values) / len(values)) for column, values in sorted(found.items())]


def _joined(points: Sequence[tuple[int, float]]) -> Iterable[tuple[int, int]]:
    """The dots of straight lines between neighbouring points: one dot for each column and row that a line crosses.

    >>> list(_joined([(0, 0.0), (1, 2.0)]))
    [(0, 0), (0, 1), (1, 1), (1, 2)]
    """
    if len(points) == 1:
        yield points[0][0], round(points[0][1])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        for x in range(x0, x1 + 1):
            at = [y0 + (y1 - y0) * min(max((edge - x0) / (x1 - x0), 0), 1) for edge in (x - 0.5, x + 0.5)]
            first, last = sorted(map(round, at))
            yield from ((x, y) for y in range(first, last + 1))


def _label(value: float) -> str:
    """A label of the y axis.

    >>> [_label(x) for x in (0.75, -3, 1234.5)]
    ['0.75', '-3.00', '1.23e+03']
    """
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"
