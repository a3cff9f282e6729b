"""Draws a live view at the bottom of a terminal while a command runs: a progress bar for each stage of work, and a few
lines."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import rich.console
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_REFRESHES_PER_SECOND = 2
_MARGIN = 5
"""Number of columns to leave empty on the right. If a terminal echoes ^C at the end of a full line, the ^C wraps to a
new line, which would remain on the screen."""
_REMEMBERED = 50
"""Number of latest updates over which the speed is measured. The number is large, so that an evaluation between two
steps does not change the estimated time left by much."""


class ProgressStage:
    """One stage of work with a progress bar.

    Args:
        what: The label in front of the bar.
        total: Number of items; None if unknown.
        done: Number of items done before this process started.
        count: Returns the number of items done. Called at each refresh, for work that does not call `update`.
        side_by_side: True if items run concurrently, as episodes do. The first items to end are the shortest and say
            little about the speed, so the time left is unknown until half of the items have ended.
        now: Returns the time in seconds.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        *,
        done: int = 0,
        count: Callable[[], int] | None = None,
        side_by_side: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.done, self.note = what, total, done, ""
        self._count, self._side_by_side, self._now = count, side_by_side, now
        self.began = now()
        self._first = (self.began, done)
        self._marks: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def update(self, done: int, note: str = "") -> None:
        """Set the number of items done, and a note to show after the count."""
        self.done, self.note = done, note
        self._marks.append((self._now(), done))

    def begin(self) -> None:
        """Measure the speed from now on, because the work has been waiting until now. Has no effect if items are
        already done."""
        if not self._marks:
            self._first = (self._now(), self.done)

    def look(self) -> None:
        """Update the number of items done, if the stage has a `count` to ask for it."""
        if self._count is not None and (done := self._count()) != self.done:
            self.update(done)

    @property
    def seconds(self) -> float:
        """Seconds since the stage began."""
        return self._now() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left, at the speed of the latest updates; None if unknown.

        Example: if 4 of 10 items are done and the last 3 took 2 seconds each, 12 seconds are left; one second later, 11
        seconds are left.
        """
        if self.total is None or not self._marks or (self._side_by_side and 2 * self.done < self.total):
            return None
        first, last = self._first if len(self._marks) == 1 else self._marks[0], self._marks[-1]
        if last[1] <= first[1] or last[0] <= first[0]:
            return None
        each = (last[0] - first[0]) / (last[1] - first[1])
        return max(0.0, (self.total - self.done) * each - (self._now() - last[0]))


class LiveView:
    """The bars of all open stages, one below the other, followed by further lines.

    Other output to the console appears above the view. If the console is not a terminal, nothing is drawn.

    Args:
        console: Where to draw.
        lines: Returns the lines below the bars, each a pair of label and text. Called at each refresh.
        now: Returns the time in seconds.
    """

    def __init__(
        self,
        console: rich.console.Console,
        *,
        lines: Callable[[], Sequence[tuple[str, Text]]] = tuple,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self._lines, self._now = console, lines, now
        self._stages: list[ProgressStage] = []
        self._is_drawn = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live: Live | None = None

    def open(
        self,
        what: str,
        total: int | None = None,
        *,
        done: int = 0,
        count: Callable[[], int] | None = None,
        side_by_side: bool = False,
    ) -> ProgressStage:
        """Open a stage, whose bar is drawn until `close`. The arguments have the same meaning as for
        `ProgressStage`."""
        stage = ProgressStage(what, total, done=done, count=count, side_by_side=side_by_side, now=self._now)
        self._stages.append(stage)
        if self._is_drawn and self._live is None:
            self._live = Live(
                console=self.console,
                get_renderable=self.drawing,
                transient=True,
                refresh_per_second=_REFRESHES_PER_SECOND,
            )
            self._live.start(refresh=True)
        return stage

    def close(self, stage: ProgressStage) -> None:
        """Remove a stage's bar. When the last bar is removed, the view ends and the terminal is restored. Other stages
        may have waited for this one (the run's steps wait for the sampler to start), so their speed is measured from
        now on."""
        self._stages.remove(stage)
        for other in self._stages:
            other.begin()
        if not self._stages:
            self.stop()

    @contextlib.contextmanager
    def stage(
        self, what: str, total: int | None = None, *, count: Callable[[], int] | None = None
    ) -> Iterator[ProgressStage]:
        """Open a stage for the duration of the block. If `count` is given, the stage's items run concurrently."""
        stage = self.open(what, total, count=count, side_by_side=count is not None)
        try:
            yield stage
        finally:
            self.close(stage)

    def stop(self) -> None:
        """End the view with all open stages, and show the cursor again."""
        self._stages.clear()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def drawing(self) -> RenderableType:
        """The current drawing, narrower than the console by `_MARGIN` columns."""
        bars = Table.grid(padding=(0, 1), expand=True)
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1, min_width=8)
        for overflow in ("ellipsis", "ellipsis", "crop"):
            bars.add_column(no_wrap=True, overflow=overflow)
        for stage in list(self._stages):
            stage.look()
            bar = ProgressBar(total=stage.total, completed=stage.done, pulse=stage.total is None)
            count = f"{stage.done:,}/{stage.total:,}" if stage.total is not None else ""
            left = "" if stage.seconds_left is None else f" left {clock(stage.seconds_left)}"
            bars.add_row(stage.what, bar, count, stage.note, f"{clock(stage.seconds)}{left}")
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for label, text in self._lines():
            rows.add_row(label, Text(text.plain.replace("\n", " "), style=text.style))
        drawn = Group(bars, rows) if rows.row_count else bars
        return Constrain(drawn, max(1, self.console.width - _MARGIN))


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds.

    >>> [clock(s) for s in (0.2, 75, 36_610)]
    ['0:00', '1:15', '10:10:10']
    """
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
