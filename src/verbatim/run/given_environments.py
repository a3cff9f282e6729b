"""Handles environments given as Python objects: they are passed on by import path if possible; otherwise they stay in
this process.

The configuration of a run is a file. A class that can be imported is written there by its import path, as if the user
had typed it. An object that exists only in this process (an instance, or a class defined in a notebook) is written as
an id that only this process can resolve, so its episodes and the trainer run in this process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.config.schema import RunConfig
from verbatim.core.errors import ConfigError
from verbatim.core.imports import is_import_path
from verbatim.core.texts import numbered, shown
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.shapes import adapter_of
from verbatim.run.rollouts import plays_elsewhere

_EXPECTED = (
    'a bundled id ("guess_number"), an import path ("my_module.MyEnvironment"), a class or function that makes an '
    'environment, an environment, a reward function with its data ({"id": exact, "args": {"data": "tasks.jsonl"}}), '
    'or a table with one of these as its id: {"id": ..., "max_turns": 4}; or a list'
)


def environment_tables(given: Any, where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (1) the tables of [[orchestrator.train.env]] for the given environments, and (2) the objects by the ids
    generated for them.

    >>> environment_tables(["guess_number", {"id": "my_module.Mine", "ratio": 2.0}], "verbatim.train()")
    ([{'id': 'guess_number'}, {'ratio': 2.0, 'import_path': 'my_module.Mine'}], {})

    Args:
        given: One environment, or a list: each an id, an import path, a class, an instance, or a table.
        where: The caller, for error messages.

    Raises:
        ConfigError: `given` is of none of these kinds.
    """
    objects: dict[str, Any] = {}
    tables = []
    for item in given if isinstance(given, list | tuple) else [given]:
        table = dict(item) if isinstance(item, Mapping) else {"id": item}
        if "id" in table:
            table |= _named(table.pop("id"), objects, where)
        tables.append(table)
    return tables, objects


def _named(given: Any, objects: dict[str, Any], where: str) -> dict[str, str]:
    """The entry of a table that names the environment. An environment without an id or import path is added to
    `objects` under a generated id."""
    if isinstance(given, str):
        return {"import_path" if is_import_path(given) else "id": given}
    makes = inspect.isclass(given) or inspect.isroutine(given)
    if not makes and not (hasattr(given, "examples") and hasattr(given, "start")):
        found, cls = f"{shown(given, 80)} ({type(given).__name__})", type(given).__name__
        if adapter_of(given) is not None:
            raise ConfigError(
                f"{where}: environment: found {found}, an object, but every episode needs a new one: "
                f"give the class, environment={cls}, or a function, environment=lambda: {cls}(...)"
            )
        raise ConfigError(f"{where}: environment: found {found}, expected {_EXPECTED}")
    if makes and (path := _import_path(given)) is not None:
        return {"import_path": path}
    name = given.__name__ if makes else type(given).__name__
    id_ = numbered(name, {*objects, *ENVIRONMENTS})
    objects[id_] = given
    return {"id": id_}


def _import_path(given: Any) -> str | None:
    """The path by which any process can import this class or function, or None if there is no such path."""
    module, name = getattr(given, "__module__", "__main__"), getattr(given, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not given:
        return None
    return f"{module}.{name}"


def makers(objects: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The table of bundled and given environments. An instance is wrapped in a function that returns it and takes no
    arguments, so that configured `args` are refused as for any other environment."""
    table: dict[str, Any] = dict(ENVIRONMENTS)
    for name, given in objects.items():
        made = inspect.isclass(given) or inspect.isroutine(given)
        table[name.replace("-", "_")] = given if made else _giving(given)
    return table


def _giving(environment: Any) -> Callable[[], Any]:
    def give() -> Any:
        return environment

    give.__qualname__ = f"{type(environment).__name__}, an instance"  # the name is shown if `args` are refused
    return give


def keep_here(config: RunConfig, objects: Mapping[str, Any], where: str) -> RunConfig:
    """Return the configuration. If an environment in it exists only in this process, also move the trainer into this
    process.

    Raises:
        ConfigError: no table of the configuration names a given environment, or the configuration puts a given
            environment, or the trainer, into another process.
    """
    names = {name.replace("-", "_") for name in objects}
    orchestrator = config.orchestrator
    evals = orchestrator.eval.env if orchestrator.eval is not None else ()
    used = [
        (f"orchestrator.{kind}.env", str(env.id), plays_elsewhere(orchestrator, env))
        for kind, envs in (("train", orchestrator.train.env), ("eval", evals))
        for env in envs
        if env.id in names
    ]
    if unused := names - {name for _, name, _ in used}:
        raise ConfigError(
            f"{where}: environments: no [[orchestrator.train.env]] and no [[orchestrator.eval.env]] has "
            f"id = {shown(min(unused), 80)}; leave this environment out, or set this id in one of those tables"
        )
    if not used:
        return config
    for place, name, is_elsewhere in used:
        if is_elsewhere:
            key = (
                f"{place}: isolated = true"
                if orchestrator.rollout.backend == "local"
                else (f'orchestrator.rollout.backend = "{orchestrator.rollout.backend}"')
            )
            raise ConfigError(_only_here(where, name, f"{key} creates it again in worker processes"))
    if config.cluster is not None and config.cluster.roles:
        raise ConfigError(
            _only_here(where, used[0][1], "[cluster] starts processes that read the configuration again; leave it out")
        )
    if config.trainer.separate_process and "separate_process" in config.trainer.model_fields_set:
        raise ConfigError(
            _only_here(
                where,
                used[0][1],
                "with trainer.separate_process = true the trainer's "
                "process reads the configuration again; leave that key out",
            )
        )
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"separate_process": False})})


def _only_here(where: str, name: str, why: str) -> str:
    return (
        f"{where}: environment {name!r} is an object that exists only in this process, and {why}. Or put its class "
        f'into a module, my_module.py, and give its import path: environment="my_module.{name}" (its '
        'arguments with it: environment={"id": "my_module.' + name + '", "args": {...}})'
    )
