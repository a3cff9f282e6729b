"""Draws a progress bar with the time left, where the console is a terminal; elsewhere it draws nothing."""

from __future__ import annotations

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_REMEMBERED = 120.0
"""Seconds over which the speed is measured: long enough that an evaluation does not change the time left by much."""


class ProgressBar:
    """One line at the bottom of a terminal; what is printed on the console meanwhile stands above it.

    Args:
        what: The word in front of the bar.
        total: What it counts to.
        console: Where to draw.
        done: What was done before.
    """

    def __init__(self, what: str, total: int, *, console: rich.console.Console, done: int = 0) -> None:
        self._progress = Progress(
            TextColumn(what), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, expand=True,
            disable=not console.is_terminal, speed_estimate_period=_REMEMBERED,
        )  # fmt: skip
        self._task = self._progress.add_task(what, total=total, completed=done, note="")
        self._progress.start()

    def update(self, done: int, note: str = "") -> None:
        """So much is done; the note stands behind the count."""
        self._progress.update(self._task, completed=done, note=note)

    def close(self) -> None:
        """The bar stays as it is; the cursor is shown again."""
        self._progress.stop()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
