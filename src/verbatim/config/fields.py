"""Looks up tables and keys in the schema, for error messages."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verbatim.config.key_locations import KeyPath
from verbatim.config.sections import BackendSettings


def section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The record whose fields are the keys of the table at `path`, or None inside a table with free-form keys."""
    section: type[BaseModel] | None = model
    for key in path:
        if isinstance(key, int):
            continue  # this is an index: the record of a list's elements was found with the list's own key
        field = section.model_fields.get(key) if section else None
        section = _record_in(field.annotation) if field else None
    return section


def field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The key at `path`, with its type and description, or None if the schema does not have this key."""
    section = section_at(model, path[:-1])
    return section.model_fields.get(str(path[-1])) if section else None


def sections_with(model: type[BaseModel], key: str) -> list[str]:
    """The outermost tables in which `key` is valid: `sections_with(RunConfig, "lr")` has "trainer.optim"."""
    names = [name for name, section in _sections(model, "") if key in section.model_fields]
    return [name for name in names if name.count(".") == min(other.count(".") for other in names)]


def keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that is not a table, under its full name. Elements of a list of tables get the index 0.

    Example:
        >>> from verbatim.config.orchestrator import TrainEnvsConfig
        >>> [name for name, _ in keys(TrainEnvsConfig, "train")][:3]
        ['train.env.0.id', 'train.env.0.import_path', 'train.env.0.name']
    """
    for name, field in model.model_fields.items():
        key = f"{path}.{name}".lstrip(".")
        section = _record_in(field.annotation)
        if section is None:
            yield key, field
        else:
            yield from keys(section, f"{key}.0" if _is_list(field.annotation) else key)


def _is_list(annotation: Any) -> bool:
    parts = typing.get_args(annotation)
    return typing.get_origin(annotation) in (tuple, list) or any(map(_is_list, parts))


def backend_tables_with(section: type[BaseModel], key: str) -> list[str]:
    """The backends' tables below a section in which `key` is valid: ["torch"] for "deterministic" in [inference]."""
    return [
        name for name, record in _records(section) if issubclass(record, BackendSettings) and key in record.model_fields
    ]


def _sections(model: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield name, model
    for key, section in _records(model):
        yield from _sections(section, f"{name}.{key}".lstrip("."))


def _records(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The tables directly below a section."""
    for key, field in model.model_fields.items():
        section = _record_in(field.annotation)
        if section is not None:
            yield key, section


def _record_in(annotation: Any) -> type[BaseModel] | None:
    """The record inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_record_in, typing.get_args(annotation))), None)
