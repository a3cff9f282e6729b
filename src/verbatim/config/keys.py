"""Refuses keys and passwords in a configuration, which is stored with the run, unless it lets them stand there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from verbatim.config.components import Problem
from verbatim.config.key_locations import KeyPath
from verbatim.config.sure_keys import keys_in
from verbatim.core.redaction import REDACTED, hide, hide_in, named_texts, variable_in

_NAMES_A_VARIABLE = ("_env", "_var", "env_from")


def problems_of_keys(document: Mapping[str, Any], *, may_stand_here: bool) -> Iterator[Problem]:
    """What is wrong with the keys in a configuration. They, and those in the environment variables that it names, are
    redacted from now on in all that this process logs.

    Args:
        document: The tables, as they were given.
        may_stand_here: What `keys_in_config` says.
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
                    f"{_instead(document, path)}; or set keys_in_config = true at the top, with which they are "
                    "stored in clear"
                ),
            )
    for path, _, text in named_texts(document):
        if REDACTED in text:
            yield path, f'found "{REDACTED}", which stands for a key that was not stored; give the key again'


def _what(value: str) -> str:
    variable = variable_in(value)
    return (
        "what looks like a key or a password"
        if variable is None
        else (f"the value of the environment variable {variable}, which has the name of a key")
    )


def _instead(document: Mapping[str, Any], path: KeyPath) -> str:
    tables = list(_tables_to(document, path))
    if path[0] == "inference" and "env" in path[:-1]:
        return "Leave it out here: servers inherit the variables of this process"
    variable = "Put it into an environment variable"
    if any("command" in table for table in tables):  # a program, or an MCP server
        name = path[-1] if len(path) > 1 and path[-2] == "env" else "NAME"
        return f'{variable}, and name that in place of it: env_from = ["{name}"]'
    if path[-1] == "api_key" or (tables and "base_url" in tables[-1]):
        return f'{variable}, and name that in place of it: api_key_env = "NAME"'
    return f"{variable}, and let the code that needs it read that"


def _tables_to(document: Any, path: KeyPath) -> Iterator[Mapping[str, Any]]:
    """The tables that a value is in, from the outermost."""
    for part in path:
        if isinstance(document, Mapping):
            yield document
        document = document[part]
