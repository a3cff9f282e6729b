"""A rich console that shows all text literally: no markup, no emoji codes, no terminal sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from verbatim.core.texts import printable

UNBOUNDED = 10_000
"""Width in columns for files and pipes, so large that lines are not wrapped and can be searched and copied."""


class PlainConsole(Console):
    r"""A rich console that prints `[bold]` and `:smile:` as written, and control characters escaped (`\x1b`), so
    strings from environments, models and paths change neither the style nor the terminal. Styles are passed as
    arguments.

    Args:
        stderr: Write to standard error instead of standard output.
        options: Options of `rich.console.Console`.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        if stderr or "file" in options:  # in a notebook rich would write to the cell instead of the file
            options = {"force_jupyter": False, **options}
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options and not os.environ.get("COLUMNS"):
            self.width = UNBOUNDED

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as a `Text`. Control characters are escaped before the string is measured, so that tables fit."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The renderable's segments, with their text escaped; rich's own control segments are unchanged."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Called if the reader has closed the pipe (`| head`): stop printing, but let the command continue."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
