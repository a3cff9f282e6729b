"""Shows how far one piece of work is, where the console is a terminal; elsewhere it shows nothing."""

from __future__ import annotations

import rich.console

from verbatim.logs.monitors.live import LiveView


class ProgressBar:
    """One line at the bottom of a terminal, until it is closed; what is printed on the console meanwhile stands above.

    Args:
        what: The words in front of the bar.
        total: What it counts to; None where that is not known.
        console: Where to draw.
        done: What was done before.
    """

    def __init__(self, what: str, total: int | None = None, *, console: rich.console.Console, done: int = 0) -> None:
        self._view = LiveView(console)
        self._stage = self._view.open(what, total, done=done)

    def update(self, done: int, note: str = "") -> None:
        """So much is done; the note stands behind the count."""
        self._stage.update(done, note)

    def close(self) -> None:
        """Take the bar away; the cursor is shown again."""
        self._view.stop()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
