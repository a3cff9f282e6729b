"""Small pieces of Markdown that a git host and Sphinx read alike."""

from __future__ import annotations

import re
from collections.abc import Sequence


def code(text: str) -> str:
    """Inline code; a bar inside is written so that it ends no cell."""
    return f"`{text}`".replace("|", "\\|")


def cell(text: str) -> str:
    """Prose of a docstring as one line of a table: bars and square brackets are text."""
    line = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", line)
    plain = [part if part.startswith("`") else re.sub(r"([\[\]<>*]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts]
    return "".join(plain).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a head."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, f"|{'---|' * len(head)}")
    return "\n".join(lines) + "\n"
