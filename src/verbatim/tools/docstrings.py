"""Parses a docstring: the description, the arguments and the return value."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_SECTIONS = "Args|Arguments|Parameters|Params|Returns|Raises|Exceptions|Except|Yields"
_SECTION = re.compile(rf"^[ \t]*(?:{_SECTIONS}):", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?:Args|Arguments|Parameters|Params):\s*")
_ENTRY = re.compile(r"\s*\*{0,2}\w+\s*(?:\(.*?\)\s*)?:")
_RETURNS = re.compile(
    rf"^[ \t]*Returns:[ \t]*\n(.*?)(?=^[ \t]*(?:{_SECTIONS}|Examples?|Notes?):[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class FunctionDoc:
    """A parsed docstring.

    Example: `"Look.\\n\\nArgs:\\n    place: A town."` has the description "Look." and the arguments
    `{"place": "A town."}`.
    """

    description: str = ""
    """Text before the sections, with its line breaks."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Description by argument name, each on one line."""
    returns: str | None = None
    """Description of the return value; None = none."""


def read_docstring(text: str, names: Collection[str]) -> FunctionDoc:
    """Parse Google, NumPy or Sphinx style: the one that describes most of the function's parameters, `names`.
    Descriptions of other names are dropped."""
    if "\n" not in text.strip():
        return FunctionDoc(description=text.strip())
    from docstring_parser import ParseError, google, numpydoc, rest  # imported here: most docstrings are one line

    best, best_score = FunctionDoc(description=_before_sections(text)), 0
    for style in (google, numpydoc, rest):
        try:
            parsed = style.parse(_with_indented_continuations(text) if style is google else text)
        except ParseError:
            continue
        arguments = {p.arg_name: _one_line(p.description) for p in parsed.params if p.arg_name in names}
        arguments = {name: said for name, said in arguments.items() if said}
        score = 2 * len(arguments) + (parsed.returns is not None) + bool(parsed.raises)
        if score > best_score:
            description, returns = parsed.description or "", parsed.returns.description if parsed.returns else None
            if style is google:
                found = _RETURNS.search(text)
                description, returns = _before_sections(text), found[1].strip() if found else None
            best, best_score = FunctionDoc(description=description, arguments=arguments, returns=returns), score
    return best


def _before_sections(text: str) -> str:
    match = _SECTION.search(text)
    return (text[: match.start()] if match else text).strip()


def _with_indented_continuations(text: str) -> str:
    """Indent continuation lines, as Google style requires; every line that starts no entry counts as one."""
    lines: list[str] = []
    inside, indent = False, None
    for line in text.splitlines():
        if not line.strip():
            lines.append(line)
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            inside, indent = _ARGUMENTS.fullmatch(line) is not None, None
        elif inside:
            indent = depth if indent is None else indent
            if depth == indent and not _ENTRY.match(line):
                line = f"    {line}"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines)


def _one_line(text: str | None) -> str:
    return re.sub(r"\s*\n+\s*", " ", (text or "").strip())
