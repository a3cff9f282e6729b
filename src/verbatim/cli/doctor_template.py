"""`verbatim doctor --template MODEL_OR_FILE`: what is proven about continuing the prompts of a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verbatim.errors import ModelError
from verbatim.renderers.chat_template import parse_template
from verbatim.renderers.proof import Row, proof_table

_APPENDED = {"tool": "tools' answers", "user": "a user's message"}
_LONGEST = 160
"""Characters of a line that are shown: some templates are one line."""
_NEWLINE = re.compile(r"\r\n|\r|\n")
"""What Jinja counts lines by, unlike `splitlines`."""
_OUTCOMES = {"always": "proven", "condition": "proven under a condition", "refused": "refused"}


def report(asked: str, *, as_json: bool) -> bool:
    """Print the table of each template there is; whether every kind of message may be appended.

    Raises:
        ModelError: no such model or file, no chat template, or one that is no Jinja.
    """
    templates = _templates(asked)
    for _, source, _ in templates:  # proofs take seconds: one that is no template is named before them
        parse_template(source)
    tables = {name: (source, proof_table(source, variables)) for name, source, variables in templates}
    if as_json:
        print(json.dumps({"template": asked, "tables": {
            name: [{**asdict(row), "text": _line(source, row)} for row in rows]
            for name, (source, rows) in tables.items()
        }}, indent=2, ensure_ascii=False))  # fmt: skip
    else:
        console = Console(highlight=False)
        for name, (source, rows) in tables.items():
            console.print(_shown(asked if name == "default" else f"{asked}, template {name!r}", source, rows))
        console.print(f"The renderer of this model: {_renderer(asked)}", markup=False)
    return all(row.outcome != "refused" for _, rows in tables.values() for row in rows)


def _templates(asked: str) -> list[tuple[str, str, Sequence[str]]]:
    """(name, source, the special tokens that it is given)"""
    file = Path(asked)
    if file.is_file():
        try:
            return [("default", file.read_text(encoding="utf-8"), ("bos_token", "eos_token", "pad_token"))]
        except (OSError, ValueError) as error:
            raise ModelError(f"{asked} cannot be read as text ({error}); expected a chat_template.jinja") from error
    tokenizer = _tokenizer(asked)
    given = tokenizer.chat_template
    named = given if isinstance(given, dict) else {"default": given}
    return [(name, source, tuple(tokenizer.special_tokens_map)) for name, source in named.items()]


def _renderer(asked: str) -> str:
    """What `auto` takes; of a template alone nothing is known."""
    if Path(asked).is_file():
        return "not known of a template alone; give a model's folder or name"
    from verbatim.renderers import create_renderer

    name = create_renderer("auto", _tokenizer(asked)).name
    return "template, so the table holds" if name == "template" else f"{name}, which bridges by rules of its own"


def _tokenizer(asked: str) -> Any:
    from verbatim.models.loading import load_tokenizer

    return load_tokenizer(asked)


def _shown(title: str, source: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in ("appended", "a bridge is", "if", "because of"):
        table.add_column(column, overflow="fold")
    for row in rows:
        line = _line(source, row)
        because = f"line {row.line}: {line}\n{row.reason}" if line is not None else ""
        table.add_row(_APPENDED[row.kind], _OUTCOMES[row.outcome], "\n".join(row.conditions), Text(because))
    return table


def _line(source: str, row: Row) -> str | None:
    if row.line is None:
        return None
    text = _NEWLINE.split(source)[row.line - 1].strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
