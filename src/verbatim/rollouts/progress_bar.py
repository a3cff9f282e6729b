"""Draws a progress bar for concurrent rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from verbatim.core.plain_console import PlainConsole
from verbatim.core.types import Trajectory


class _TimeLeft(TimeRemainingColumn):
    """Shows the remaining time once half of the rollouts have ended. Rollouts run concurrently, so the rollouts that
    end first are the shortest, and an estimate from these rollouts would be wrong."""

    def render(self, task: Task) -> Text:
        return super().render(task) if 2 * task.completed >= (task.total or 0) else Text("-:--:--")


@contextlib.contextmanager
def progress_bar(total: int, shown: bool | None) -> Iterator[Callable[[Trajectory], None]]:
    """Context manager that shows a progress bar. Its value is a function to call with each finished trajectory.

    Args:
        total: Number of rollouts.
        shown: True to show the bar, False to show no bar, None to show the bar only if standard error is a terminal.
    """
    console = PlainConsole(stderr=True)
    num_failed = 0
    progress = Progress(
        TextColumn("rollouts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        _TimeLeft(),
        console=console,
        disable=not (console.is_terminal if shown is None else shown),
    )
    task = progress.add_task("rollouts", total=total, failed="")

    def advance(trajectory: Trajectory) -> None:
        nonlocal num_failed
        num_failed += trajectory.error is not None
        progress.update(task, advance=1, failed=f"{num_failed} failed" if num_failed else "")

    with progress:
        yield advance
