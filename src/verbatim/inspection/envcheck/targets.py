"""Finds the environments that a user names by id, import path, Python file, or the TOML file of a run."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.config import ComponentTables, load_config
from verbatim.config.schema import RunConfig
from verbatim.core.ctrl_c import is_ctrl_c
from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.imports import told
from verbatim.environments.shapes import adapter_of


@dataclass(frozen=True, kw_only=True)
class CheckTarget:
    """One environment to check."""

    name: str
    """The id of a bundled environment, or an import path."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The arguments for creating the environment."""
    max_turns: int | None = None
    """Maximum number of turns per episode, if the environment's table in a TOML file sets it; else None."""
    seq_len: int | None = None
    """Maximum number of tokens per sample, if the TOML file sets it; else None."""
    config: RunConfig | None = None
    """The run's configuration, if the environment comes from a TOML file; else None."""


def find_targets(given: str, args: Mapping[str, Any], tables: ComponentTables | None = None) -> list[CheckTarget]:
    """Find the environments that are named in one of the forms `guess_number`, `my_env:MyEnv`, `my_env.py`,
    `my_env.py:MyEnv` or `run.toml`.

    Args:
        given: The name as typed by the user.
        args: Arguments for the environment. They must be empty for a TOML file, because its tables contain the
            arguments.
        tables: The components that a TOML file may name. If None, the names and parameters of components are not
            validated.

    Raises:
        UsageError: the file does not exist, has no environment or more than one, or `args` were given with a TOML file.
    """
    path, _, attribute = given.removeprefix("@").partition(":")
    if path.endswith(".toml"):
        if args:
            raise UsageError(f"--args cannot be combined with {path}: change the arguments in its tables")
        return _in_config(Path(path), tables)
    if path.endswith(".py"):
        return [CheckTarget(name=_in_module(Path(path), attribute), args=args)]
    return [CheckTarget(name=given, args=args)]


def _in_config(path: Path, tables: ComponentTables | None) -> list[CheckTarget]:
    config = load_config(path, tables=tables)
    orchestrator = config.orchestrator
    evals = orchestrator.eval.env if orchestrator.eval is not None else ()
    found: list[CheckTarget] = []
    for env in (*orchestrator.train.env, *evals):
        target = CheckTarget(
            name=env.import_path or str(env.id),
            args=env.args,
            max_turns=env.max_turns,
            seq_len=orchestrator.seq_len,
            config=config,
        )
        if target not in found:
            found.append(target)
    return found


def _in_module(path: Path, attribute: str) -> str:
    """Make the file's folder importable, and return the import path of the environment in the file."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if attribute:
        return f"{path.stem}.{attribute}"
    try:
        module = importlib.import_module(path.stem)
    except BaseException as error:  # a user's module may raise any exception
        if is_ctrl_c(error):
            raise
        raise ComponentError(f"importing {path} failed: {told(error)}") from error
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == path.stem
        and callable(getattr(value, "examples", None))
        and callable(getattr(value, "start", None))
    ] or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == path.stem and adapter_of(value) is not None
    ]
    if len(names) != 1:
        found = f"the classes {', '.join(names)}" if names else "no class with the methods examples and start"
        raise UsageError(f"{path} has {found}; type for example: verbatim env check {path}:{(names or ['MyEnv'])[0]}")
    return f"{path.stem}.{names[0]}"
