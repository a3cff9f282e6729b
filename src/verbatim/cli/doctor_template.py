"""`verbatim doctor --template MODEL_OR_FILE`: renders probe dialogues to find out where prompts rendered with a chat
template can be continued exactly, and how the template handles tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from verbatim.core.errors import ModelError, TemplateFault
from verbatim.core.plain_console import PlainConsole
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.bridge_probes import SITUATIONS, BridgeProbe, probe_bridges
from verbatim.models.renderers.chat_template import compile_template
from verbatim.models.renderers.special_token_escaping import EscapingTokenizer
from verbatim.models.renderers.stand_in import stand_in_tokenizer
from verbatim.models.renderers.stop_ids import ends_in_words
from verbatim.models.renderers.template import TemplateRenderer
from verbatim.models.renderers.tool_support import USE_HERMES, ToolSupport

_NEEDED = ("a tool's answer", "a user's message")
"""Kinds of messages that environments append."""
_LONGEST = 160
"""Maximum number of characters shown of a template line: some templates are a single line."""
_NEWLINE = re.compile(r"\r\n|\r|\n")
"""The line breaks that Jinja counts; `splitlines` also splits at further characters."""


@dataclass(frozen=True, kw_only=True)
class _Template:
    """One chat template of a model, with the findings."""

    name: str
    source: str
    probes: Sequence[BridgeProbe]
    tools: ToolSupport
    hermes: str | None
    """Where tools = "hermes" would insert the tools; None if there is no place for them."""


def report(asked: str, *, as_json: bool) -> bool:
    """Print the findings for each template. True if everything that environments append can be bridged in at least one
    situation, and tools are supported.

    Raises:
        ModelError: the model or file does not exist, has no chat template, or the template is not valid Jinja.
    """
    templates = [_look(name, tokenizer) for name, tokenizer in _tokenizers(asked)]
    by_name = {template.name: template for template in templates}
    # The template that a tokenizer would use for messages with tools.
    main = by_name.get("tool_use", by_name.get("default", templates[0]))
    if as_json:
        print(
            json.dumps(
                {
                    "template": asked,
                    "tables": {
                        template.name: [
                            {**asdict(probe), "text": _line(template.source, probe)} for probe in template.probes
                        ]
                        for template in templates
                    },
                    "tools": {**asdict(main.tools), "hermes": main.hermes},
                },
                indent=2,
            )
        )
    else:
        console = PlainConsole()
        for template in templates:
            _show(console, asked if template.name == "default" else f"{asked}, template {template.name!r}", template)
        console.print(f"Tools: {_said_of_tools(main.tools, main.hermes)}", markup=False)
        console.print(f"The renderer of this model: {_renderer(asked)}", markup=False)
    bridged = [{probe.appended for probe in template.probes if probe.outcome == "bridged"} for template in templates]
    return main.tools.complete and all(found.issuperset(_NEEDED) for found in bridged)


def _tokenizers(asked: str) -> list[tuple[str, Any]]:
    """Each template's name, with a tokenizer that uses it."""
    file = Path(asked)
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{asked} cannot be read as text ({error}); expected a chat_template.jinja") from error
        compile_template(source, asked)
        return [("default", stand_in_tokenizer(source, asked))]
    given = load_tokenizer(asked).chat_template
    found = []
    for name, source in (given if isinstance(given, dict) else {"default": given}).items():
        compile_template(source, asked)
        tokenizer = load_tokenizer(asked)
        tokenizer.chat_template = source
        found.append((name, tokenizer))
    return found


def _look(name: str, tokenizer: Any) -> _Template:
    """Probe one chat template."""
    escaping = EscapingTokenizer(tokenizer)
    renderer = TemplateRenderer(escaping)
    try:
        return _Template(
            name=name,
            source=escaping.chat_source(),
            probes=probe_bridges(renderer, escaping),
            tools=renderer.tool_support,
            hermes=_hermes(escaping),
        )
    except TemplateFault as error:
        raise ModelError(str(error)) from error


def _hermes(tokenizer: EscapingTokenizer) -> str | None:
    try:
        return TemplateRenderer(tokenizer, tools="hermes").room_for_tools
    except ModelError:
        return None


def _said_of_tools(support: ToolSupport, hermes: str | None) -> str:
    if support.complete:
        return "shown, and calls are written and read back"
    lacks = f"the chat template {' and '.join(support.lacks)}, so environments with tools are refused"
    if hermes is None:
        return f'{lacks}; tools = "hermes" does not fit it either: give the model a chat_template.jinja with tools'
    return f"{lacks}; {USE_HERMES}. Hermes on this template: {hermes}"


def _renderer(asked: str) -> str:
    """The renderer that `auto` selects; unknown if only a template was given."""
    if Path(asked).is_file():
        return "unknown for a template alone; give a model's folder or name"
    renderer = create_renderer("auto", load_tokenizer(asked))
    is_template = renderer.name == "template"
    choice = "template, so the table applies" if is_template else f"{renderer.name}, which bridges by its own rules"
    return f"{choice}; {ends_in_words(renderer)}"


def _show(console: PlainConsole, title: str, template: _Template) -> None:
    """Print one row per kind of appended message and outcome, with the situations, and the reasons below the table."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for column in ("appended", "a bridge is", "situations"):
        table.add_column(column, overflow="fold")
    notes: dict[int | str, str] = {}
    for appended, probes in groupby(template.probes, key=lambda probe: probe.appended):
        alike: dict[tuple[str, int | None], list[BridgeProbe]] = {}
        for probe in probes:
            alike.setdefault((probe.outcome, probe.line), []).append(probe)
        for number, ((outcome, line), found) in enumerate(alike.items()):
            situations = "all" if len(found) == len(SITUATIONS) else ", ".join(probe.situation for probe in found)
            because = found[0].reason
            if line is not None:
                because = f"line {line}: {_line(template.source, found[0])}\n(turn {found[0].turn}) {because}"
            if because:  # a template line is quoted only once, with the first reason that involves it
                notes.setdefault(line or because, because)
                situations += f" ({list(notes).index(line or because) + 1})"
            table.add_row("" if number else appended, outcome, situations)
    console.print(table)
    for number, because in enumerate(notes.values(), start=1):
        console.print(f"({number}) {because}", markup=False)


def _line(source: str, probe: BridgeProbe) -> str | None:
    if probe.line is None:
        return None
    text = _NEWLINE.split(source)[probe.line - 1].strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
