"""Answers a shell's completion requests: commands, options, keys of the configuration, recipes, environments.

The shell calls the command itself, with `_ARGCOMPLETE` set and the typed line in `COMP_LINE`; argcomplete does the
rest. `verbatim completion SHELL` prints the code that makes a shell do this.
"""

from __future__ import annotations

import argparse
import os
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import argcomplete
from argcomplete.completers import ChoicesCompleter, DirectoriesCompleter, FilesCompleter, SuppressCompleter

from verbatim.cli.main import KEYED, make_parser

SHELLS = ("bash", "zsh", "fish")


def answer(**kwargs: Any) -> None:
    """Print the completions of `COMP_LINE`, and end the process.

    Args:
        kwargs: Passed to `argcomplete.autocomplete`; tests pass `output_stream` and `exit_method`.
    """
    argcomplete.autocomplete(parser_for(os.environ.get("COMP_LINE", "")), always_complete_options=False, **kwargs)


def parser_for(line: str) -> argparse.ArgumentParser:
    """The parser for the command in the line, with completers, and with the configuration's keys as options."""
    typed = next((word for word in _words(line)[1:] if not word.startswith("-")), None)
    parser = make_parser(typed)
    command = parser.commands.get(typed or "")
    if command is not None:
        _add_completers(command)
        if typed in KEYED:
            _add_keys(command)
    return parser


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote is still open, because the user is still typing
        return line.split()


def _add_completers(command: argparse.ArgumentParser) -> None:
    """Attach a completer to each argument, chosen by its metavar."""
    from verbatim.config.recipe_files import recipes
    from verbatim.environments import ENVIRONMENTS

    def runs(prefix: str, **_: Any) -> Iterable[str]:
        return [*recipes(), *FilesCompleter(allowednames=["toml"])(prefix)]

    def environments(prefix: str, **_: Any) -> Iterable[str]:
        return [*ENVIRONMENTS, *FilesCompleter(allowednames=["py", "toml"])(prefix)]

    by_name: Mapping[tuple[str, bool], Callable[..., Iterable[str]]] = {
        ("FILE", True): runs,
        ("ENVIRONMENT", True): environments,
        ("NAME", True): ChoicesCompleter(dict.fromkeys(recipes(), "")),
        ("NAME", False): SuppressCompleter(),
        ("FOLDER", False): DirectoriesCompleter(),
        ("DIR", True): DirectoriesCompleter(),
        ("DIR", False): DirectoriesCompleter(),
    }
    for action in command._actions:
        completer = by_name.get((str(action.metavar), not action.option_strings))
        if action.dest == "env":
            completer = ChoicesCompleter(ENVIRONMENTS)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]


def _add_keys(command: argparse.ArgumentParser) -> None:
    """Add every key of the configuration as an option, like `--trainer.optim.lr`, with the key's values if they can be
    listed."""
    from verbatim.config.backends import schema_with_backends
    from verbatim.config.fields import keys
    from verbatim.run.tables import component_tables

    schema, _ = schema_with_backends({}, component_tables())
    for key, field in keys(schema):
        option = f"--{key.replace('_', '-')}"
        if option not in command._option_string_actions:
            action = command.add_argument(option, help=(field.description or "").replace("%", "%%"))
            action.completer = ChoicesCompleter(dict.fromkeys(values(field.annotation), ""))  # type: ignore[attr-defined]


def values(annotation: Any) -> list[str]:
    """The possible values of a key; empty if they cannot be listed.

    >>> values(Literal["rows", "tree"] | None), values(bool), values(int)
    (['rows', 'tree'], ['true', 'false'], [])
    """
    if annotation is bool:
        return ["true", "false"]
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [
        value
        for inner in typing.get_args(annotation)
        if isinstance(inner, type) or typing.get_args(inner)
        for value in values(inner)
    ]
