"""Refuses keys and passwords in a configuration, which is stored with the run, unless `keys_in_config` allows them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.config.components import Problem
from verbatim.config.key_locations import KeyPath
from verbatim.config.sure_keys import keys_in
from verbatim.core.redaction import REDACTED, hide, hide_in, named_texts, variable_in

_NAMES_A_VARIABLE = ("_env", "_var", "env_from")
"""If a setting's name has one of these endings, its value is the name of an environment variable that holds a key."""


def problems_of_keys(document: Mapping[str, Any], *, may_stand_here: bool) -> Iterator[Problem]:
    """Problems with keys and passwords in a configuration.

    From now on, this process redacts these keys and passwords in everything that it logs, and also the values of the
    environment variables that the configuration names.

    Args:
        document: The configuration as given.
        may_stand_here: The value of `keys_in_config`.
    """
    for path, _, text in named_texts(document):
        if any(str(key).endswith(_NAMES_A_VARIABLE) for key in path):
            hide(os.environ.get(text))
    for path, name, value in keys_in(document):
        hide_in(name, value)
        if not may_stand_here:
            yield (
                path,
                (
                    f"found {_what(value)}, and configurations are stored with their runs. "
                    f"{_instead(document, path)}; or set keys_in_config = true at the top level, which stores it in "
                    "clear text"
                ),
            )
    for path, _, text in named_texts(document):
        if REDACTED in text:
            yield path, f'found "{REDACTED}", the placeholder of a key that was not stored; enter the key again'


def _what(value: str) -> str:
    variable = variable_in(value)
    return (
        "what looks like a key or a password"
        if variable is None
        else (f"the value of the environment variable {variable}, which is named like a key")
    )


def _instead(document: Mapping[str, Any], path: KeyPath) -> str:
    tables = list(_tables_to(document, path))
    if path[0] == "inference" and "env" in path[:-1]:
        return "Leave it out here: servers inherit the environment variables of this process"
    variable = "Put it into an environment variable"
    if any("command" in table for table in tables):  # a program, or an MCP server
        name = path[-1] if len(path) > 1 and path[-2] == "env" else "NAME"
        return f'{variable}, and give its name here instead: env_from = ["{name}"]'
    if path[-1] == "api_key" or (tables and "base_url" in tables[-1]):
        return f'{variable}, and give its name here instead: api_key_env = "NAME"'
    return f"{variable}, and let the code that needs it read that variable"


def _tables_to(document: Any, path: KeyPath) -> Iterator[Mapping[str, Any]]:
    """The tables that contain a value, outermost first."""
    for part in path:
        if isinstance(document, Mapping):
            yield document
        document = document[part]
