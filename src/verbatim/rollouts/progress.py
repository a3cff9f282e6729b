"""Shows a progress bar on standard error for rollouts that people wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verbatim.plain_console import PlainConsole
from verbatim.types import Trajectory


@contextlib.contextmanager
def progress_bar(total: int, shown: bool | None) -> Iterator[Callable[[Trajectory], None]]:
    """Draws for as long as the block lasts; what it yields is told of each trajectory that ended.

    Args:
        total: The length of the bar.
        shown: None = where standard error is a terminal.
    """
    console = PlainConsole(stderr=True)
    num_failed = 0
    progress = Progress(
        TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=console, disable=not (console.is_terminal if shown is None else shown),
    )  # fmt: skip
    task = progress.add_task("rollouts", total=total, failed="")

    def advance(trajectory: Trajectory) -> None:
        nonlocal num_failed
        num_failed += trajectory.error is not None
        progress.update(task, advance=1, failed=f"{num_failed} failed" if num_failed else "")

    with progress:
        yield advance
