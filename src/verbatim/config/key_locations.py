"""Finds the line of each key in a TOML text, because the standard parser returns values without line numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of the file: `("orchestrator", "train", "env", 0, "id")`."""


def dotted(path: KeyPath) -> str:
    """The path as text: `orchestrator.train.env.0.id`."""
    return ".".join(map(str, path))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a table, with their values; elements of a list of tables are numbered from 0."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}")
    else:
        yield name, value


def line_numbers(text: str) -> dict[KeyPath, int]:
    """The line number (from 1) of every table, key and list element of a valid TOML text.

    Keys inside a value that spans several lines get the line where the statement with this value begins.

    Example:
        >>> line_numbers('seed = 1\\n[[env]]\\nid = "a"')
        {('seed',): 1, ('env',): 2, ('env', 0): 2, ('env', 0, 'id'): 3}
    """
    # Not `splitlines`, which also splits at characters that TOML allows in strings, such as U+2028.
    lines = text.replace("\r\n", "\n").split("\n")
    found: dict[KeyPath, int] = {}
    last_index: dict[KeyPath, int] = {}
    table: KeyPath = ()
    start = 0
    while start < len(lines):
        end, parsed = _statement(lines, start)
        if lines[start].lstrip().startswith("["):
            table = _enter(parsed, last_index)
            for depth in range(1, len(table) + 1):
                found.setdefault(table[:depth], start + 1)
        else:
            _record(parsed, table, start + 1, found)
        start = end
    return found


def _statement(lines: list[str], start: int) -> tuple[int, dict[str, Any]]:
    """The index of the line after the statement that begins at `start`, and the parsed statement.

    No beginning of a statement is valid TOML, so the first lines that can be parsed are the whole statement.
    """
    for end in range(start + 1, len(lines) + 1):
        try:
            return end, tomllib.loads("\n".join(lines[start:end]))
        except tomllib.TOMLDecodeError:
            continue  # the value continues on the next line
    raise AssertionError(f"line {start + 1} does not begin a statement, although the whole text is valid TOML")


def _enter(header: Any, last_index: dict[KeyPath, int]) -> KeyPath:
    """The path that a `[a.b]` or `[[a.b]]` line opens, including the indices of the list elements on the way."""
    path: KeyPath = ()
    while header:
        ((key, header),) = header.items()
        path = (*path, key)
        if isinstance(header, list):
            last_index[path] = last_index.get(path, -1) + 1
            header = header[0]
        if path in last_index:
            path = (*path, last_index[path])
    return path


def _record(value: Any, path: KeyPath, line: int, found: dict[KeyPath, int]) -> None:
    if path:
        found.setdefault(path, line)
    if isinstance(value, dict):
        for key, inner in value.items():
            _record(inner, (*path, key), line, found)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _record(inner, (*path, index), line, found)
