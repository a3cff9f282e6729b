"""Finds the backend that a section's key `backend` selects by name or import path, and the class of the backend's
settings.

A backend is a function or class, called as `backend(inputs, settings)`. The annotation of `settings` defines the keys
of the backend's table, for example [inference.torch]. Importing the module of a backend must not load heavy packages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from verbatim.config.components import ComponentTables, Problem, Table, unknown
from verbatim.config.inference import InferenceConfig
from verbatim.config.key_locations import KeyPath, dotted
from verbatim.config.orchestrator import OrchestratorConfig, RolloutConfig
from verbatim.config.parameters import evaluate
from verbatim.config.schema import RunConfig
from verbatim.config.sections import BackendSection, BackendSettings, table_of
from verbatim.core.errors import ComponentError
from verbatim.core.imports import import_object, is_import_path

_Section = TypeVar("_Section", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The backend selected by a section, with the class of its settings."""

    function: Callable[..., Any]
    """The backend, called as `function(inputs, settings)`."""
    settings: type[BackendSettings]
    """The record into which the backend's own table is parsed."""


def find_backend(name: str, table: Table, *, what: str) -> Backend:
    """Find a backend by its name in the table, or import it by its import path.

    Args:
        name: "torch", or "my_module.MySampler".
        table: Maps a name to a function, or to its import path.
        what: The kind of backend, for errors: "inference backend".

    Raises:
        ComponentError: there is no such name or module, or the object cannot be called as `backend(inputs, settings)`.
    """
    entry = name if is_import_path(name) else table.get(name)
    if entry is None:
        raise ComponentError(unknown(what, name, table, '; or import your own: backend = "my_module.MyBackend"'))
    function = import_object(entry) if isinstance(entry, str) else entry
    return Backend(function=function, settings=_settings_of(function, f"{what} {name!r}"))


def _settings_of(function: Any, named: str) -> type[BackendSettings]:
    """The class with which the parameter `settings` is annotated.

    Raises:
        ComponentError: the signature or the annotation does not fit a backend.
    """
    expected = "expected a function or class that can be called as backend(inputs, settings)"
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise ComponentError(f"{named} is {type(function).__name__}; {expected}") from None
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p not in positional[:2]
    ]
    if len(positional) < 2 or positional[1].name != "settings" or needed:
        raise ComponentError(f"{named} takes ({', '.join(parameters)}); {expected}")
    found = positional[1].annotation
    try:
        found = evaluate(found, function) if isinstance(found, str) else found
    except NameError as error:
        raise ComponentError(f"{named}: the annotation of settings cannot be read: {error}") from None
    if not (inspect.isclass(found) and issubclass(found, BackendSettings)):
        raise ComponentError(
            f"{named}: settings is annotated with {found!r}; expected a subclass of "
            "verbatim.config.BackendSettings, whose fields are the keys of its table"
        )
    return found


def settings_for(section: BackendSection, name: str, backend: Backend) -> BackendSettings:
    """A backend's settings from its table in the section, or the defaults if there is no such table."""
    given = getattr(section, table_of(name), None)
    return backend.settings.model_validate({} if given is None else given)


def schema_with_backends(document: Mapping[str, Any], tables: ComponentTables) -> tuple[type[RunConfig], list[Problem]]:
    """Return (1) the schema of a document, in which each backend's table is a key of its section, and (2) problems with
    import paths.

    The backends are the backends named in the component tables, and the backends that the document names by import
    path. If the document lacks the table of the backend in use, this table has the defaults. Tables of other backends
    are validated if present, and otherwise ignored.
    """
    inference, wrong = _tables_of(document, ("inference",), InferenceConfig, tables.samplers)
    rollout, also_wrong = _tables_of(document, ("orchestrator", "rollout"), RolloutConfig, tables.runners)
    return _schema(inference, rollout), [*wrong, *also_wrong]


@dataclass(frozen=True)
class _Tables:
    """The backends' tables of one section."""

    by_name: tuple[tuple[str, type[BackendSettings]], ...]
    in_use: str


def _tables_of(
    document: Mapping[str, Any], path: KeyPath, section: type[BackendSection], table: Table
) -> tuple[_Tables, list[Problem]]:
    found = {name: find_backend(name, table, what=section.what).settings for name in table}
    key: KeyPath = (*path, "backend")
    given: Any = document
    for part in key:
        given = given.get(part) if isinstance(given, Mapping) else None
    if given is None:
        given = section.model_fields["backend"].default
    if not isinstance(given, str):  # validation refuses this later, like any key of the wrong type
        return _Tables(tuple(found.items()), ""), []
    known = _Tables(tuple(found.items()), given if given in table else "")
    if given in table:
        return known, []
    try:
        settings = find_backend(given, table, what=section.what).settings
    except ComponentError as error:
        return known, [(key, str(error))]
    name = table_of(given)
    if name in section.model_fields:
        taken = f"the table of {given!r} would be [{dotted(path)}.{name}], a key shared by all backends; rename it"
        return known, [(key, taken)]
    return _Tables(tuple({**found, name: settings}.items()), name), []


# The result is cached: building the pydantic models takes several times as long as validating a file.
@functools.cache
def _schema(inference: _Tables, rollout: _Tables) -> type[RunConfig]:
    with_rollout = _with(OrchestratorConfig, rollout=_with_tables(RolloutConfig, rollout))
    return _with(RunConfig, inference=_with_tables(InferenceConfig, inference), orchestrator=with_rollout)


def _with_tables(section: type[_Section], tables: _Tables) -> type[_Section]:
    class Closed(section):  # type: ignore[valid-type,misc]
        __doc__ = section.__doc__
        model_config = ConfigDict(extra="forbid")

    fields: dict[str, Any] = {}
    for name, settings in tables.by_name:
        description = settings.__doc__
        if name == tables.in_use:
            fields[name] = (settings, Field(default_factory=dict, validate_default=True, description=description))
        else:
            fields[name] = (settings | None, Field(default=None, description=description))
    return create_model(section.__name__, __base__=Closed, __doc__=section.__doc__, **fields)


def _with(section: type[_Section], **sections: type[BaseModel]) -> type[_Section]:
    """The section with some of its tables replaced by more detailed tables."""
    fields: dict[str, Any] = {}
    for name, inner in sections.items():
        old = section.model_fields[name]
        default: Any = {} if old.is_required() else {"default_factory": dict, "validate_default": True}
        fields[name] = (inner, Field(description=old.description, **default))
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)
