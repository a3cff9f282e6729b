"""Explains the errors of a configuration: where a key came from, what was found, and what was expected."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import ErrorDetails

from verbatim.config.fields import backend_tables_with, field_at, section_at, sections_with
from verbatim.config.key_locations import KeyPath, dotted
from verbatim.config.known_keys import key_elsewhere, moved_to
from verbatim.config.overrides import Override
from verbatim.config.schema import RunConfig
from verbatim.config.sections import BackendSection
from verbatim.core.errors import ConfigError
from verbatim.core.redaction import without_secrets
from verbatim.core.texts import nearest

_AN_ENVIRONMENT = ' For example: [[orchestrator.train.env]] and below it id = "guess_number"'
_TO_TYPE = {name: _AN_ENVIRONMENT for name in ("orchestrator", "orchestrator.train", "orchestrator.train.env")}
_TO_TYPE["model"] = ' For example: [model] and below it name = "Qwen/Qwen3-0.6B"'
"""For each required key, an example to type if the key is missing."""
_NAMED_BY = ("type", "backend", "id", "name")
"""Keys that select a variant of a table: someone who writes `loss = "ppo"` means `type = "ppo"`."""
_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}


@dataclass
class KeyLocations:
    """The file and line, or the override, that set each key. Every error message begins with this place."""

    file: str
    lines: dict[KeyPath, int]
    overrides: dict[KeyPath, Override] = field(default_factory=dict)
    schema: type[RunConfig] = RunConfig
    """The schema against which keys are looked up; it includes the backends' tables once these are known."""

    def of(self, path: KeyPath) -> str:
        """Where a key was set: `file:line` or the override as typed, followed by overrides below this key, which may be
        the actual cause."""
        below = [str(o) for p, o in self.overrides.items() if p[: len(path)] == path and len(p) > len(path)]
        return self._origin(path) + (f" (with {', '.join(below)})" if below else "")

    def _origin(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return str(self.overrides[path[:length]])
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]}"
        return self.file

    def set(self, path: KeyPath, override: Override) -> None:
        """Record an override, which replaces everything that the file has at and below the override's key."""
        for known in (self.lines, self.overrides):
            for below in [p for p in known if p[: len(path)] == path]:
                del known[below]
        self.overrides[path] = override


def refuse(problems: list[str], locations: KeyLocations) -> None:
    """Raise one ConfigError with all problems; does nothing if there are none."""
    # Messages quote the values that were found, which may be keys or passwords.
    problems = [without_secrets(problem) for problem in problems]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} errors in {locations.file}:\n  " + "\n  ".join(problems))


def explain(error: ErrorDetails, locations: KeyLocations) -> str:
    """One error as one line: the place, the key, what was found, what was expected, what to type."""
    path: KeyPath = error["loc"]
    where, name, found = locations.of(path), dotted(path), error["input"]
    match error["type"]:
        case "extra_forbidden":
            return f"{where}: {unknown_key(path, locations.schema)}"
        case "missing":
            field = field_at(locations.schema, path)
            about = f": {field.description[0].lower()}{field.description[1:]}" if field and field.description else ""
            return f"{where}: {name} is missing{about}{_TO_TYPE.get(name, '')}"
        case "value_error":
            return f"{where}: {f'{name}: ' if name else ''}{error['ctx']['error']}"
        case "tuple_type":
            expected = f"a list, or [[{name}]] tables" if section_at(locations.schema, path) else "a list"
        # A section such as [monitor] takes tables under any key. A plain value is probably a misspelt key of its own.
        case "model_type" | "dict_type" if _near_a_key(path, locations.schema):
            return f"{where}: {unknown_key(path, locations.schema)}"
        case "model_type" | "dict_type":
            expected = "a table" + _of_a_backend(path, locations.schema)
            section = section_at(locations.schema, path)
            key = next((key for key in _NAMED_BY if section and key in section.model_fields), None)
            if key is not None and isinstance(found, str):
                line = f"{key} = {short(found)}"
                expected += f": {{ {line} }}" if isinstance(path[-1], int) else f": [{name}] and below it {line}"
        case "too_short":
            expected = "at least one element"
        case _:
            expected = error["msg"].removeprefix("Input should be ")
    kind = _KINDS.get(type(found), type(found).__name__)
    # pydantic's message quotes each value that is allowed.
    near = nearest(found, re.findall("'([^']*)'", expected)) if isinstance(found, str) else ""
    return f"{where}: {name}: found {short(found)} ({kind}), expected {expected}{near}"


def _of_a_backend(path: KeyPath, schema: type[RunConfig]) -> str:
    """A hint that the key may belong in a backend's own table, for a schema without the backends' tables."""
    section = section_at(schema, path[:-1])
    is_open = section is not None and issubclass(section, BackendSection) and path[-1] not in section.model_fields
    return f"; a backend's own keys belong in its table, [{dotted(path[:-1])}.NAME]" if is_open else ""


def _near_a_key(path: KeyPath, schema: type[RunConfig]) -> bool:
    section = section_at(schema, path[:-1])
    key = str(path[-1])
    return section is not None and key not in section.model_fields and bool(nearest(key, section.model_fields))


def short(value: Any) -> str:
    """A value as JSON, truncated to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown_key(path: KeyPath, schema: type[RunConfig]) -> str:
    """Describe what may be meant by an unknown key: the nearest valid key, the table in which the key would be valid,
    and the keys that are valid where the unknown key was found."""
    key = str(path[-1])
    section = section_at(schema, path[:-1])
    name, prefix = dotted(path), dotted(path[:-1])
    if section is None:
        return f"{name}: unknown key"
    if now := moved_to(name):
        return f"{name} {now}"
    if moved := backend_tables_with(section, key):
        return f"{name} is now {' or '.join(f'{prefix}.{table}.{key}' for table in moved)}"
    table = f"[{dotted(tuple(part for part in path[:-1] if isinstance(part, str)))}]" if prefix else "the top level"
    valid = list(section.model_fields)
    hint = key_elsewhere(key) or nearest(key, valid)
    elsewhere = [] if hint else sections_with(schema, key)
    if elsewhere:
        hint = f"; it belongs to {' or '.join(f'[{place}]' if place else 'the top level' for place in elsewhere)}"
    hint = hint if hint.endswith(("?", ".")) else f"{hint}."
    keys = f"The keys of {table} are {', '.join(valid)}" if valid else f"{table} has no keys"
    return f'{name}: unknown key "{key}" in {table}{hint} {keys}'
