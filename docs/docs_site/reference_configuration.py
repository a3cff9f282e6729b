"""Writes the configuration reference: every table and key of a run's file, from the schema that reads it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs_site.markdown import cell, code, table
from verbatim.config.backends import schema_with_backends
from verbatim.config.parameters import is_made_of_parameters
from verbatim.config.schema import ComponentConfig
from verbatim.core.imports import import_object
from verbatim.run.tables import component_tables

HEAD = """# Configuration reference

Every table and key of a run's file, with type, default and meaning. This page is generated from the code by
`make reference`; [Configuration](configuration.md) explains how a file is read.

A key is also an option of every command that takes a file: `trainer.optim.lr` is `--trainer.optim.lr`. A key without a
default is "required"; one that is "unset" may be left out. A table has a section; one that stands in several places, as
`sampling` does, has one section for all of them. A component (a loss, an advantage, a filter) has a `type`, and keys
that depend on it: see [Losses](#losses), [Advantages](#advantages), [Filters](#filters), and
[Extending](extending.md) for one of your own.
"""

COMPONENTS = (
    ("trainer.loss", "losses", "Losses", "algorithms.md#losses"),
    ("orchestrator.advantage", "advantages", "Advantages", "algorithms.md#advantages"),
    ("[orchestrator.filters]", "filters", "Filters", "algorithms.md#filters"),
    ("monitor.alarms.NAME", "alarms", "Alarms", "alarms.md"),
)
"""Place in the file, table, heading, and the section that says what they do."""


def document() -> str:
    """The whole page."""
    schema, problems = schema_with_backends({}, component_tables())
    assert not problems
    parts = [HEAD]
    found = sorted(_sections(schema, "", is_list=False), key=lambda place: _prominence(place[0]))
    homes: dict[type[BaseModel], str] = {}
    for path, section, _ in found:
        homes.setdefault(section, path)
    shown = [place for place in _sections(schema, "", is_list=False) if homes[place[1]] == place[0]]
    shown = [place for place in shown if place[1].model_fields]
    parts += [_section(*place, homes) for place in shown]
    parts += [_components(*entry) for entry in COMPONENTS]
    return "\n".join(parts).rstrip() + "\n"


def _sections(section: type[BaseModel], path: str, *, is_list: bool) -> Iterator[tuple[str, type[BaseModel], bool]]:
    yield path, section, is_list
    for name, field in section.model_fields.items():
        inner, repeated = _record(field.annotation)
        if inner is not None and not issubclass(inner, ComponentConfig):
            yield from _sections(inner, f"{path}.{name}".lstrip("."), is_list=repeated)


def _record(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table that a key holds, and whether it holds a list of them."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in typing.get_args(annotation):
        record, repeated = _record(inner)
        if record is not None:
            return record, repeated or typing.get_origin(annotation) in (tuple, list)
    return None, False


def _prominence(path: str) -> tuple[bool, int, str]:
    """A table that stands in several places is described in the first of this order."""
    return "eval" in path, path.count("."), path


def _section(path: str, section: type[BaseModel], is_list: bool, homes: Mapping[type[BaseModel], str]) -> str:
    name = f"[[{path}]]" if is_list else f"[{path}]"
    lines = [f"## {code(name)}" if path else "## Top level", "", cell(_sentence(section.__doc__)), ""]
    fields = {key: field for key, field in section.model_fields.items() if not _is_without_keys(field)}
    rows = [[code(key), *_row(field, homes)] for key, field in fields.items()]
    lines.append(table(["key", "type", "default", "meaning"], rows))
    return "\n".join([*lines, ""])


def _is_without_keys(field: FieldInfo) -> bool:
    """True for the table of a backend that has no settings."""
    inner, _ = _record(field.annotation)
    return inner is not None and not issubclass(inner, ComponentConfig) and not inner.model_fields


def _row(field: FieldInfo, homes: Mapping[type[BaseModel], str]) -> list[str]:
    inner, repeated = _record(field.annotation)
    kind = _type(field.annotation, field.metadata)
    if inner is not None and not issubclass(inner, ComponentConfig):
        kind = f"[{kind}](#{homes[inner].replace('.', '')})"
    elif inner is not None:
        kind = "components" if repeated else "component"
    return [kind, _default(field), cell(field.description or "")]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    inner, repeated = _record(field.annotation)
    if inner is not None and (field.default_factory is not None or isinstance(field.default, BaseModel)):
        return _set(field.default) if isinstance(field.default, BaseModel) else "defaults"
    if repeated and isinstance(field.default, tuple) and all(isinstance(v, ComponentConfig) for v in field.default):
        return ", ".join(code(f'"{v.type}"') for v in field.default) or "none"
    value = field.default
    if field.default_factory is not None:
        value = field.get_default(call_default_factory=True, validated_data={"formulate_mode": None})
    if value is None or value is PydanticUndefined:
        return "unset"
    return code(toml(value))


def _set(record: BaseModel) -> str:
    """The keys that a table's default sets itself."""
    given = {name: getattr(record, name) for name in sorted(record.model_fields_set)}
    return code("{ " + ", ".join(f"{k} = {toml(v)}" for k, v in given.items()) + " }") if given else "defaults"


def toml(value: Any) -> str:
    """A value as a file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) and (value == 0 or abs(value) < 0.01) else str(value)


NAMES = {int: "integer", float: "number", str: "text", bool: "boolean", Path: "path", NoneType: "", Any: "any"}


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type in words, with its bounds."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0], [*inner[1:], *metadata])
    if origin is Literal:
        return " or ".join(code(toml(value)) for value in inner)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(filter(None, (_type(each, metadata) for each in inner))))
    record, repeated = _record(annotation)
    if record is not None:
        return "tables" if repeated else "table"
    if origin in (tuple, list):
        return f"list of {_type(inner[0])}"
    if origin is dict or annotation is dict:
        return "table"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    """` > 0, <= 1`, from pydantic's and annotated-types' marks."""
    flat = [m for mark in metadata for m in (getattr(mark, "metadata", None) or [mark])]
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [f"{sign} {_number(getattr(m, name))}" for m in flat for name, sign in signs.items() if hasattr(m, name)]
    return f" {', '.join(found)}" if found else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _sentence(doc: str | None) -> str:
    return " ".join(inspect.cleandoc(doc or "").split())


def _components(path: str, kind: str, title: str, link: str) -> str:
    """The built-in components of a table, with their parameters."""
    rows = []
    for name, entry in getattr(component_tables(), kind).items():
        target = import_object(entry) if isinstance(entry, str) else entry
        rows.append([code(f'"{name}"'), ", ".join(code(parameter) for parameter in _parameters(target)) or "none"])
    page = link.partition(".")[0].capitalize()
    about = f"Values of `type` in `[{path}]`, and the keys that each has there. [{page}]({link}) says what they do."
    return f"## {title}\n\n{about}\n\n{table(['type', 'keys and defaults'], rows)}\n"


def _parameters(target: Any) -> list[str]:
    function = target if inspect.isclass(target) or inspect.isfunction(target) else target.function
    parameters = list(inspect.signature(function).parameters.values())
    own = parameters if is_made_of_parameters(target) else parameters[1:]
    set_here = dict(getattr(target, "parameters", {})) if not inspect.isclass(target) else {}
    found = []
    for p in own:
        default = set_here.get(p.name, p.default)
        found.append(f"{p.name} = {toml(default)}" if default is not p.empty and default is not None else p.name)
    return found
