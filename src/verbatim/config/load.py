"""Loads a TOML file and command-line overrides as one frozen `RunConfig`, or raises one error that lists every mistake.

Relative paths in the file (`model.name`, `run_dir`, data files) are resolved against the current directory, as on the
command line, not against the file's folder. Modules named in the file are searched for in the current directory first,
then in the file's folder.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from verbatim.config.backends import schema_with_backends
from verbatim.config.components import ComponentTables, Problem, check_components
from verbatim.config.explain import KeyLocations, explain, refuse, short, unknown_key
from verbatim.config.fields import field_at, section_at
from verbatim.config.key_locations import KeyPath, dotted, line_numbers
from verbatim.config.keys import problems_of_keys
from verbatim.config.overrides import (
    UNSET,
    Override,
    apply_override,
    assign,
    assignments,
    parse_overrides,
    parse_value,
)
from verbatim.config.plain_values import TOO_DEEP, TOO_LONG, problems_of_values
from verbatim.config.recipe_files import recipes
from verbatim.config.schema import RunConfig
from verbatim.core.errors import ConfigError
from verbatim.core.imports import search_beside


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    tables: ComponentTables | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    caller: str = "verbatim.run",
) -> RunConfig:
    """Read a run's file, apply the overrides, and validate the result. Nothing starts before the whole configuration is
    valid.

    Args:
        path: The TOML file.
        overrides: Command-line arguments after the file: `["--orchestrator.batch-size", "64"]`.
        tables: If given, every component named in the file is looked up and its parameters are checked.
        settings: Values set in Python, nested like the file's tables. They replace values of the file; None unsets a
            key.
        caller: Name of the function that received the settings, for errors.

    Raises:
        ConfigError: the file does not exist or is not valid TOML, or it has an unknown key, a wrong type, or an
            impossible combination. The message names file and line (or the override), the key, what was found, what was
            expected and the nearest valid key.
    """
    path = Path(path)
    search_beside(path)
    text = _read(path)
    document = _parse(text, path)
    locations = KeyLocations(file=str(path), lines=line_numbers(text))
    overridden = _apply(document, parse_overrides(overrides), locations)
    for key, value in assignments(settings or {}, caller):
        assign(document, key, value)
        locations.set(key, Override(flag=f"{caller}({dotted(key)}={short(value)})", text=None))
    return _checked(document, locations, tables, overridden)


def make_config(
    *settings: Mapping[str, Any], tables: ComponentTables | None = None, caller: str = "verbatim.run"
) -> RunConfig:
    """Validate a configuration written in Python, nested like the tables of a file. Error messages have the same form
    as for a file.

    Args:
        settings: `{"model": {"name": "..."}, "max_steps": 20, "orchestrator": {...}}`. A dot in a top-level key leads
            into a table, as in TOML: `{"trainer.optim.lr": 1e-4}`. Later settings replace keys of earlier settings.
        tables: As for `load_config`.
        caller: Name of the function that received the settings, for errors.

    Raises:
        ConfigError: as for `load_config`, with the function in place of file and line.
    """
    document: dict[str, Any] = {}
    for given in settings:
        for key, value in assignments(given, caller):
            assign(document, key, value)
    return _checked(document, KeyLocations(file=f"{caller}()", lines={}), tables)


def _checked(
    document: dict[str, Any],
    locations: KeyLocations,
    tables: ComponentTables | None,
    overridden: Sequence[tuple[KeyPath, Override]] = (),
) -> RunConfig:
    def refuse_all(problems: Iterable[Problem]) -> None:
        refuse([f"{locations.of(path)}: {dotted(path)}: {message}" for path, message in problems], locations)

    # The order matters: json.dumps in `_validate` would fail on values that are too deep or too long, the backends'
    # tables must be in the schema before any key is looked up, and components can only be checked in a valid
    # configuration.
    refuse_all(problems_of_values(document))
    problems: list[Problem] = []
    if tables is not None:
        locations.schema, problems = schema_with_backends(document, tables)
    _check_overrides(overridden, locations)
    refuse_all(problems)
    config = _validate(document, locations)
    refuse_all(problems_of_keys(document, may_stand_here=config.keys_in_config))
    if tables is not None:
        refuse_all(check_components(config, tables))
    return config


def dump_config(config: RunConfig) -> str:
    """The whole configuration, including defaults, as TOML that `load_config` reads back as an equal configuration."""
    return tomli_w.dumps(_plain(config.model_dump(exclude_none=True)))


def _plain(value: Any) -> Any:
    """Convert paths to strings. pydantic's JSON mode is not used, because it would turn `inf` into null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


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
    if not path.suffix and (near := difflib.get_close_matches(str(path).replace("-", "_"), recipes(), n=1, cutoff=0.5)):
        return f"; did you mean the recipe {near[0]}?"
    names = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4) or names[:1]
    return f"; did you mean {path.parent / near[0]}?" if near else f"; no *.toml in {path.parent}"


def _parse(text: str, path: Path) -> dict[str, Any]:
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: found a Python file, expected the TOML file of a run, which names the environment: "
            f'import_path = "{path.stem}.MyEnv"; `verbatim init DIR` writes one'
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, line, column = str(error), str(text.count("\n") + 1), "1"
        if at := re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", reason):
            reason, line, column = at[1], at[2] or line, at[3] or column
        hint = '; a string needs quotes: key = "text"' if reason.startswith("Invalid value") else ""
        raise ConfigError(f"{path}:{line}:{column}: not valid TOML: {reason}{hint}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except ValueError:  # this has more digits than Python converts to an integer
        raise ConfigError(f"{path}: {TOO_LONG}") from None


def _apply(
    document: dict[str, Any], overrides: Sequence[Override], locations: KeyLocations
) -> list[tuple[KeyPath, Override]]:
    """Set the keys of the overrides in the document; returns the key path of each override."""
    problems, applied = [], []
    for override in overrides:
        try:
            path = apply_override(document, override, True if override.text is None else parse_value(override.text))
        except ConfigError as error:
            problems.append(str(error))
            continue
        except RecursionError:
            problems.append(f"{override.flag}: {TOO_DEEP}")
            continue
        locations.set(path, override)
        applied.append((path, override))
    refuse(problems, locations)
    return applied


def _check_overrides(overridden: Sequence[tuple[KeyPath, Override]], locations: KeyLocations) -> None:
    """Refuse an override without a value for a key that is not a boolean, and an override that unsets an unknown
    key."""
    problems = []
    for path, override in overridden:
        if locations.overrides.get(path) is not override:
            continue  # a later override replaced it
        field = field_at(locations.schema, path)
        if override.text is None and field is not None and field.annotation is not bool:
            problems.append(f"{override.flag}: needs a value: {field.description or ''}")
        section = section_at(locations.schema, path[:-1])
        is_free = section is None or section.model_config.get("extra") == "allow" or isinstance(path[-1], int)
        if override.text == UNSET and field is None and not is_free:
            problems.append(f"{override}: {unknown_key(path, locations.schema)}")
    refuse(problems, locations)


def _validate(document: dict[str, Any], locations: KeyLocations) -> RunConfig:
    while True:
        try:
            # Strict JSON has the types of TOML ("64" is not 64, true is not 1), but accepts a list for a tuple and a
            # string for a path, which strict Python validation refuses.
            return locations.schema.model_validate_json(json.dumps(document, default=str), strict=True)
        except ValidationError as error:
            errors = error.errors()
        # `--name 2024` was parsed as a number, but the schema wants a string: retry with the text as typed.
        texts = [locations.overrides.get(e["loc"]) for e in errors if e["type"] in ("string_type", "path_type")]
        overrides = [override for override in texts if override is not None and override.text is not None]
        if not overrides:
            refuse([explain(e, locations) for e in errors if not _follows_from_another(e)], locations)
            raise AssertionError("a validation error without an error")
        for override in overrides:
            apply_override(document, override, override.text)


def _follows_from_another(error: ErrorDetails) -> bool:
    """True for an error that pydantic reports in addition to the error that caused it. For example, a list with wrong
    elements is also reported as too short, and a default that depends on a wrong key is also reported as missing."""
    return error["type"] == "default_factory_not_called" or (error["type"] == "too_short" and bool(error["input"]))
