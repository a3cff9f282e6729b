"""Prints aligned lines of steps, and a progress bar below where there is a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import rich.console
from rich.text import Text

from verbatim.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor
from verbatim.monitors.progress_bar import ProgressBar
from verbatim.plain_console import PlainConsole

COLUMNS = (
    ("reward", "reward/mean"),
    ("success", "success"),
    ("failed", "rollouts/failed_share"),
    ("turns", "turns"),
    ("mismatch KL", "mismatch_kl"),
    ("age", "staleness/mean"),
    ("sampler tok/s", "sampler/tokens_per_second"),
    ("idle s", "time/sampler_idle"),
    ("trainer tok/s", "tokens_per_second"),
    ("idle s", "time/trainer_idle"),
)
"""Heading and metric of each column. A metric that is missing or NaN is shown as -."""

HEADER_EVERY = 20
"""Lines of steps between two headings."""

SECONDS_BETWEEN = 5.0
"""On a terminal, a step that ends sooner after the last line is shown in the bar alone."""


class Console(Monitor):
    """Prints steps and evaluations. On a terminal there is a bar with the time left, lines have as many columns as fit,
    and of quick steps not every one has a line. Elsewhere every step has a whole line.

    Args:
        max_steps: The length of the bar.
        console: Where to print; standard output by default.
        first_step: Steps done before this process started (a resumed run).
        now: A clock, in seconds.
    """

    def __init__(
        self, max_steps: int, *, console: rich.console.Console | None = None, first_step: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.console = console or PlainConsole()
        self.max_steps = max_steps
        self._num_lines = 0
        self._now = now
        self._last_line = -math.inf
        self._bar = ProgressBar("training", max_steps, console=self.console, done=first_step)

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """One line, under a heading every so often."""
        self._bar.update(step, note=f"reward {format_number(metrics.get('reward/mean', math.nan))}")
        width = None
        if self.console.is_terminal:
            if self._now() - self._last_line < SECONDS_BETWEEN and step < self.max_steps:
                return
            width = self.console.width
        if self._num_lines % HEADER_EVERY == 0:
            self._print(header(self.max_steps, width), style="dim")
        self._num_lines += 1
        self._print(step_line(step, self.max_steps, metrics, width))
        self._last_line = self._now()

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """One line with every metric of the evaluation."""
        line = Text(eval_line(step, env, metrics), style="bold")
        self.console.print(line, soft_wrap=not self.console.is_terminal)  # a terminal would break it within a word

    def close(self) -> None:
        self._bar.close()

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style=style), soft_wrap=True)


def header(max_steps: int, width: int | None = None) -> str:
    """The columns' names over their values, as many as fit into the width."""
    return _fit([f"{'step':>{_step_width(max_steps)}}", *(f"{name:>{_width(name)}}" for name, _ in COLUMNS)], width)


def step_line(step: int, max_steps: int, metrics: Metrics, width: int | None = None) -> str:
    """One step: `3/100`, then the columns that fit into the width.

    >>> step_line(3, 100, {"reward/mean": 0.5})
    '   3/100    0.500        -        -        -            -        -              -        -              -        -'
    >>> step_line(3, 100, {"reward/mean": 0.5}, 26)
    '   3/100    0.500        -'
    """
    cells = [f"{format_number(metrics.get(key, math.nan)):>{_width(name)}}" for name, key in COLUMNS]
    return _fit([f"{f'{step}/{max_steps}':>{_step_width(max_steps)}}", *cells], width)


def _fit(cells: Sequence[str], width: int | None) -> str:
    """The first cells that fit, two spaces between them; all of them where no width is given."""
    line = cells[0]
    for cell in cells[1:]:
        if width is not None and len(line) + 2 + len(cell) > width:
            break
        line += f"  {cell}"
    return line


def eval_line(step: int, env: str, metrics: Metrics) -> str:
    """`eval  guess_number  after step 20  success 0.910  turns 2.500`."""
    values = "  ".join(f"{name} {format_number(value)}" for name, value in metrics.items())
    return f"eval  {env}  after step {step}  {values}"


def format_number(value: float) -> str:
    """Four significant places at most, `-` for NaN.

    >>> [format_number(x) for x in (float("nan"), 0.5, 12345.6, 0.00012, 7, 0.0)]
    ['-', '0.500', '12,346', '1.2e-04', '7', '0.000']
    """
    if math.isnan(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value) or value == 0 or 0.001 <= abs(value) < 10:
        return f"{value:.3f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def _width(name: str) -> int:
    return max(len(name), 7)


def _step_width(max_steps: int) -> int:
    return 2 * len(str(max_steps)) + 2
