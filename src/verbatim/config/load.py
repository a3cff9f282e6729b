"""A TOML file and command-line overrides to one frozen `RunConfig`, or one error that lists every mistake.

Relative paths in the file (`model.name`, `run_dir`, data files) are relative to the current directory, as on the
command line, not to the file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from verbatim.config.backends import schema_with_backends
from verbatim.config.components import ComponentTables, Problem, check_components
from verbatim.config.fields import (
    annotation_at,
    backend_tables_with,
    description_at,
    nearest,
    section_at,
    sections_with,
)
from verbatim.config.origins import KeyPath, line_numbers
from verbatim.config.overrides import UNSET, Override, apply_override, parse_overrides, parse_value
from verbatim.config.python_values import NotPlain, assign, assignments
from verbatim.config.schema import RunConfig
from verbatim.config.sections import BackendSection
from verbatim.errors import ConfigError

_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_config(
    path: str | Path, overrides: Sequence[str] = (), tables: ComponentTables | None = None, *,
    settings: Mapping[str, Any] = _NOTHING, caller: str = "verbatim.run",
) -> RunConfig:  # fmt: skip
    """Read, override and validate; nothing is started before everything is valid.

    Args:
        path: The TOML file.
        overrides: What was typed after it: `["--orchestrator.batch-size", "64"]`.
        tables: With them, every component named in the file is looked up and its knobs are checked.
        settings: Values given in Python, nested as the file's tables; they replace the file's, and None unsets a key.
        caller: The function that was given the settings, for errors.

    Raises:
        ConfigError: no such file, no valid TOML, an unknown key, a wrong type, an impossible combination; names
            file and line (or the override) and key, what was found, what was expected and the nearest valid key.
    """
    path = Path(path)
    text = _read(path)
    document = _parse(text, path)
    places = _Places(file=str(path), lines=line_numbers(text))
    overridden = _apply(document, parse_overrides(overrides), places)
    for key, value in _assignments(settings, caller):
        assign(document, key, value)
        places.set(key, Override(flag=f"{caller}({'.'.join(map(str, key))}={_short(value)})", text=None))
    return _checked(document, places, tables, overridden)


def make_config(
    *settings: Mapping[str, Any], tables: ComponentTables | None = None, caller: str = "verbatim.run"
) -> RunConfig:
    """A configuration that is written in Python, nested as the tables of a file; refused with the same messages.

    Args:
        settings: `{"model": {"name": "..."}, "max_steps": 20, "orchestrator": {...}}`. A dot in a key of the top level
            leads into a table, as in TOML: `{"trainer.optim.lr": 1e-4}`. Later ones replace keys of earlier ones.
        tables: As for `load_config`.
        caller: The function that was given the settings, for errors.

    Raises:
        ConfigError: as `load_config`; names the function in place of file and line.
    """
    document: dict[str, Any] = {}
    for key, value in [item for given in settings for item in _assignments(given, caller)]:
        assign(document, key, value)
    return _checked(document, _Places(file=f"{caller}()", lines={}), tables)


def _assignments(settings: Mapping[str, Any], caller: str) -> list[tuple[KeyPath, Any]]:
    try:
        return list(assignments(settings))
    except NotPlain as error:
        raise ConfigError(f"{caller}(): {error}") from None


def _checked(
    document: dict[str, Any], places: _Places, tables: ComponentTables | None,
    overridden: Sequence[tuple[KeyPath, Override]] = (),
) -> RunConfig:  # fmt: skip
    problems: list[Problem] = []
    if tables is not None:
        places.schema, problems = schema_with_backends(document, tables)
    _check_overrides(overridden, places)
    _refuse([f"{places.of(p.path)}: {p.message}" for p in problems], places)
    config = _validate(document, places)
    if tables is not None:
        _refuse([f"{places.of(p.path)}: {p.message}" for p in check_components(config, tables)], places)
    return config


def dump_config(config: RunConfig) -> str:
    """The whole configuration, defaults included, as TOML that `load_config` reads back to an equal one."""
    return tomli_w.dumps(_plain(config.model_dump(exclude_none=True)))


def _plain(value: Any) -> Any:
    """Paths as text; pydantic's own JSON mode would turn `inf` into null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


@dataclass
class _Places:
    """The origin of each key, with which every error message begins."""

    file: str
    lines: dict[KeyPath, int]
    overrides: dict[KeyPath, Override] = field(default_factory=dict)
    schema: type[RunConfig] = RunConfig
    """What may stand where; with the tables of the backends, once they are known."""

    def of(self, path: KeyPath) -> str:
        """`file:line`, or the override as it was typed; and the overrides below, which may be what is wrong."""
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
        """An override hides what the file said at and below its key."""
        for known in (self.lines, self.overrides):
            for below in [p for p in known if p[: len(path)] == path]:
                del known[below]
        self.overrides[path] = override


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, expected a TOML file{_nearest_file(path / 'config.toml')}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}), expected a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _nearest_file(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4) or names[:1]
    return f"; did you mean {path.parent / near[0]}?" if near else f"; no *.toml in {path.parent}"


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line, column = str(error), str(text.count("\n") + 1), "1"
        if at := re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", reason):
            reason, line, column = at[1], at[2] or line, at[3] or column
        hint = '; a text needs quotes: key = "text"' if reason.startswith("Invalid value") else ""
        raise ConfigError(f"{path}:{line}:{column}: not valid TOML: {reason}{hint}") from None


def _apply(document: dict[str, Any], overrides: Sequence[Override], places: _Places) -> list[tuple[KeyPath, Override]]:
    """Set the overrides' keys; which key each of them is."""
    problems, applied = [], []
    for override in overrides:
        try:
            path = apply_override(document, override, True if override.text is None else parse_value(override.text))
        except ConfigError as error:
            problems.append(str(error))
            continue
        places.set(path, override)
        applied.append((path, override))
    _refuse(problems, places)
    return applied


def _check_overrides(overridden: Sequence[tuple[KeyPath, Override]], places: _Places) -> None:
    """Refuse a key without a value that is no boolean, and one that is unset although there is no such key."""
    problems = []
    for path, override in overridden:
        if places.overrides.get(path) is not override:
            continue  # another one replaced it
        if override.text is None and annotation_at(places.schema, path) not in (bool, None):
            problems.append(f"{override.flag}: needs a value: {description_at(places.schema, path)}")
        if override.text == UNSET and not _may_be_unset(path, places.schema):
            problems.append(f"{override}: {_unknown_key(path, places.schema)}")
    _refuse(problems, places)


def _may_be_unset(path: KeyPath, schema: type[RunConfig]) -> bool:
    """Whether there is such a key (free-form tables may hold any)."""
    section = section_at(schema, path[:-1])
    free = section is None or section.model_config.get("extra") == "allow"
    return free or isinstance(path[-1], int) or str(path[-1]) in section.model_fields  # type: ignore[union-attr]


def _validate(document: dict[str, Any], places: _Places) -> RunConfig:
    try:
        return _from_document(document, places.schema)
    except ValidationError as error:
        errors = error.errors()
    # `--name 2024`: what reads as a number may stand for a text, and only the schema knows.
    texts = [e["loc"] for e in errors if e["type"] in ("string_type", "path_type") and _text_at(e["loc"], places)]
    for path in texts:
        apply_override(document, places.overrides[path], places.overrides[path].text)
    if texts:
        try:
            return _from_document(document, places.schema)
        except ValidationError as error:
            errors = error.errors()
    _refuse([_explain(e, places) for e in errors if not _follows_from_another(e)], places)
    raise AssertionError("a validation error without an error")


def _follows_from_another(error: ErrorDetails) -> bool:
    """A list with wrong elements is also reported as empty, and a default that depends on a wrong key as missing."""
    return error["type"] == "default_factory_not_called" or (error["type"] == "too_short" and bool(error["input"]))


def _from_document(document: dict[str, Any], schema: type[RunConfig]) -> RunConfig:
    # Strict JSON is TOML's own reading of types: no "64" for 64, no true for 1, but lists and paths as they are.
    return schema.model_validate_json(json.dumps(document, default=str), strict=True)


def _text_at(path: KeyPath, places: _Places) -> bool:
    return path in places.overrides and places.overrides[path].text is not None


def _refuse(problems: list[str], places: _Places) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} mistakes in {places.file}:\n  " + "\n  ".join(problems))


def _explain(error: ErrorDetails, places: _Places) -> str:
    """One mistake as a line: where, which key, what was found, what was expected, what to type."""
    path: KeyPath = error["loc"]
    where, name = places.of(path), ".".join(map(str, path))
    found, message = error["input"], error["msg"]
    match error["type"]:
        case "extra_forbidden":
            return f"{where}: {_unknown_key(path, places.schema)}"
        case "missing":
            about = description_at(places.schema, path)
            return f"{where}: {name} is missing{f': {about[0].lower()}{about[1:]}' if about else ''}"
        case "value_error":
            return f"{where}: {f'{name}: ' if name else ''}{error['ctx']['error']}"
        case "tuple_type":
            expected = f"a list, or [[{name}]] tables" if section_at(places.schema, path) else "a list"
        case "model_type" | "dict_type" if _near_a_key(path, places.schema):  # where other keys are tables: [monitor]
            return f"{where}: {_unknown_key(path, places.schema)}"
        case "model_type" | "dict_type":
            expected = "a table" + _of_a_backend(path, places.schema)
        case "too_short":
            expected = "at least one element"
        case _:
            expected = message.removeprefix("Input should be ")
    kind = _KINDS.get(type(found), type(found).__name__)
    near = nearest(found, re.findall("'([^']*)'", expected)) if isinstance(found, str) else ""
    return f"{where}: {name}: found {_short(found)} ({kind}), expected {expected}{near}"


def _of_a_backend(path: KeyPath, schema: type[RunConfig]) -> str:
    """Where a key of one backend belongs, for a schema that does not know the backends' tables."""
    section = section_at(schema, path[:-1])
    is_open = section is not None and issubclass(section, BackendSection) and path[-1] not in section.model_fields
    return f"; a backend's own keys stand in its table, [{'.'.join(map(str, path[:-1]))}.NAME]" if is_open else ""


def _near_a_key(path: KeyPath, schema: type[RunConfig]) -> bool:
    section = section_at(schema, path[:-1])
    key = str(path[-1])
    return section is not None and key not in section.model_fields and bool(nearest(key, section.model_fields))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unknown_key(path: KeyPath, schema: type[RunConfig]) -> str:
    key = str(path[-1])
    section = section_at(schema, path[:-1])
    table = f"[{'.'.join(str(part) for part in path[:-1] if isinstance(part, str))}]" if path[:-1] else "the top level"
    name = ".".join(map(str, path))
    if section is None:
        return f"{name}: unknown key"
    if moved := backend_tables_with(section, key):
        prefix = ".".join(map(str, path[:-1]))
        return f"{name} is now {' or '.join(f'{prefix}.{table}.{key}' for table in moved)}"
    valid = list(section.model_fields)
    hint = nearest(key, valid)
    elsewhere = [] if hint else sections_with(schema, key)
    if elsewhere:
        hint = f"; it belongs to {' or '.join(f'[{place}]' if place else 'the top level' for place in elsewhere)}"
    hint = hint if hint.endswith("?") else f"{hint}."
    return f'{name}: unknown key "{key}" in {table}{hint} The keys of {table} are {", ".join(valid)}'
