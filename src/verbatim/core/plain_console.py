"""Builds a rich console that shows all text literally: no markup, no emoji codes, no terminal sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from verbatim.core.texts import printable

UNBOUNDED = 10_000
"""Columns of a file or a pipe: nothing is wrapped there, so that lines can be searched and copied."""


class PlainConsole(Console):
    r"""A rich console on which `[bold]` and `:smile:` are shown as they are written, and a control character as `\x1b`:
    texts of environments, models and paths change neither the style nor the terminal. Styles are given as arguments.

    Args:
        stderr: Standard error in place of standard output.
        options: As for `rich.console.Console`.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        if stderr or "file" in options:  # in a notebook rich would show it in the cell, and write nothing to the file
            options = {"force_jupyter": False, **options}
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options and not os.environ.get("COLUMNS"):
            self.width = UNBOUNDED

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as `Text`; control characters are escaped before it is measured, so that tables fit."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments with escaped text; rich's own control segments stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """The reader went away (`| head`): nothing more is printed, and what the command does goes on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
