"""Resolves a component from its name and knobs in the file; checks the knobs against its signature.

The tables come from the caller: this package sees none of the components, and imports no torch by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verbatim.config.fields import nearest
from verbatim.config.knobs import check_knobs, is_made_of_knobs
from verbatim.config.known_names import known_elsewhere
from verbatim.config.origins import KeyPath
from verbatim.config.schema import ComponentConfig, EnvConfig, RunConfig
from verbatim.errors import ComponentError
from verbatim.imports import import_object, is_import_path

Table = Mapping[str, Any]
"""Name to component: a function, a class whose fields are its knobs, a record with a `function`, or the import path
of one of these, `"module:name"`, where importing it is better left to those who use it."""


@dataclass(frozen=True, kw_only=True)
class ComponentTables:
    """The tables that the names in a configuration are looked up in."""

    losses: Table
    """For [trainer.loss]."""
    advantages: Table
    """For [orchestrator.advantage]."""
    filters: Table
    """For [[orchestrator.filters]]."""
    strategies: Table
    """For orchestrator.trajectory_strategy."""
    environments: Table
    """For the id of [[orchestrator.train.env]] and [[orchestrator.eval.env]]."""
    monitors: Table
    """For the tables below [monitor]."""
    packers: Table
    """For trainer.packing."""
    samplers: Table
    """For inference.backend."""
    runners: Table
    """For orchestrator.rollout.backend."""
    renderers: Collection[str]
    """For the name of [orchestrator.renderer]: only looked up, since a renderer is made for a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a component."""

    path: KeyPath
    """The key that is wrong."""
    message: str
    """What was found and what was expected."""


def resolve(component: ComponentConfig, table: Table, *, what: str, where: str, num_inputs: int = 1) -> Any:
    """The component with its knobs bound.

    A function gives a `functools.partial`, and so does a class of monitors, whose constructor takes the input; another
    class (a frozen dataclass with `__call__`) gives an instance; a record with a `function` and `knobs`, as in
    `LOSSES`, gives a copy with its knobs set.

    Args:
        component: What the file says.
        table: The built-ins.
        what: The kind, for errors: "loss".
        where: The key, for errors: "trainer.loss".
        num_inputs: How many leading parameters are data; every other parameter is a knob.

    Raises:
        ComponentError: no such name, an import that fails, an unknown or missing knob, or one of the wrong type.
    """
    bound = _bind(_Use.of(component, what, where, num_inputs), table)
    if isinstance(bound, list):
        raise ComponentError("\n".join(problem.message for problem in bound))
    target, knobs = bound.target, bound.knobs
    if is_made_of_knobs(target):
        try:
            return target(**knobs)
        except (TypeError, ValueError) as error:
            raise ComponentError(f"{where}: {what} {target.__qualname__} refuses {knobs}: {error}") from error
    if _is_record(target):
        return dataclasses.replace(target, knobs={**target.knobs, **knobs})
    return functools.partial(target, **knobs)


def check_components(config: RunConfig, tables: ComponentTables) -> list[Problem]:
    """Everything that is wrong with the components a run names. Nothing is called; custom modules are imported."""
    found: list[Problem] = []
    for use, table in _uses(config, tables):
        bound = _bind(use, table)
        if isinstance(bound, list):
            found += bound
        elif use.what == "advantage" and getattr(bound.target, "compares_rewards", False):
            found += _group_of_one(config, use)
    renderer = config.orchestrator.renderer.name
    if renderer not in tables.renderers:
        found.append(_unknown(("orchestrator", "renderer", "name"), "renderer", renderer, tables.renderers))
    return found


def _group_of_one(config: RunConfig, use: _Use) -> list[Problem]:
    """Refuse groups of one rollout under an advantage that compares the rewards of a group."""
    orchestrator = config.orchestrator
    own = [env.advantage for env in orchestrator.train.env]
    is_read = orchestrator.training_mode == "rl" and (use.path != ("orchestrator", "advantage") or None in own)
    if orchestrator.group_size > 1 or not is_read or use.path[:2] == ("orchestrator", "eval"):
        return []
    return [Problem(path=("orchestrator", "group_size"), message=(
        f'orchestrator.group_size = 1 gives every rollout the advantage 0 under "{use.name or use.import_path}", which '
        "compares it with the others of its group; expected at least 2"
    ))]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A component and its knobs, both checked."""

    target: Any
    knobs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One place of the configuration that names a component."""

    path: KeyPath
    what: str
    name: str | None
    import_path: str | None
    knobs: dict[str, Any]
    name_key: KeyPath
    import_key: KeyPath
    knobs_key: KeyPath
    num_inputs: int

    @classmethod
    def of(cls, component: ComponentConfig, what: str, where: str | KeyPath, num_inputs: int) -> _Use:
        path: KeyPath = tuple(where.split(".")) if isinstance(where, str) else where
        custom = component.type == "custom"
        import_path = component.custom_path
        return cls(
            path=path, what=what, num_inputs=num_inputs, knobs=component.knobs,
            name=component.type if import_path is None else None, import_path=import_path,
            name_key=(*path, "type"), import_key=(*path, "import_path" if custom else "type"),
            knobs_key=(*path, "kwargs") if custom else path,
        )  # fmt: skip

    @classmethod
    def of_name(cls, name: str, what: str, key: KeyPath, knobs: dict[str, Any]) -> _Use:
        """A component that is one key, its name or import path; `knobs` are given by the code that calls it."""
        own = is_import_path(name)
        return cls(
            path=key, what=what, name=None if own else name, import_path=name if own else None, knobs=knobs,
            name_key=key, import_key=key, knobs_key=key, num_inputs=1,
        )  # fmt: skip

    @classmethod
    def of_environment(cls, env: EnvConfig, path: KeyPath) -> _Use:
        return cls(
            path=path, what="environment", name=env.id, import_path=env.import_path, knobs=env.args, num_inputs=0,
            name_key=(*path, "id"), import_key=(*path, "import_path"), knobs_key=(*path, "args"),
        )  # fmt: skip


def _uses(config: RunConfig, tables: ComponentTables) -> Iterator[tuple[_Use, Table]]:
    orchestrator = config.orchestrator
    yield _Use.of(config.trainer.loss, "loss", ("trainer", "loss"), 1), tables.losses
    packing: KeyPath = ("trainer", "packing")
    given = {"micro_batch_tokens": 1, "keep_whole": False}  # what the trainer calls it with, beside the samples
    yield _Use.of_name(config.trainer.packing, "packer", packing, given), tables.packers
    yield _Use.of(orchestrator.advantage, "advantage", ("orchestrator", "advantage"), 1), tables.advantages
    for i, rule in enumerate(orchestrator.filters):
        yield _Use.of(rule, "filter", ("orchestrator", "filters", i), 1), tables.filters
    for label, monitor in config.monitor.components.items():
        use = _Use.of(monitor, "monitor", ("monitor", label), 1)
        named_by_key = monitor.type == label
        yield dataclasses.replace(use, name_key=use.path) if named_by_key else use, tables.monitors
    evals = orchestrator.eval.env if orchestrator.eval else ()
    strategies: list[tuple[KeyPath, str | None]] = [(("orchestrator",), orchestrator.trajectory_strategy)]
    for kind, envs in (("train", orchestrator.train.env), ("eval", evals)):
        for i, env in enumerate(envs):
            path: KeyPath = ("orchestrator", kind, "env", i)
            yield _Use.of_environment(env, path), tables.environments
            strategies.append((path, env.trajectory_strategy))
            if env.advantage is not None:
                yield _Use.of(env.advantage, "advantage", (*path, "advantage"), 1), tables.advantages
    for path, name in strategies:
        if name is not None:
            key = (*path, "trajectory_strategy")
            yield _Use.of_name(name, "trajectory strategy", key, {}), tables.strategies


def _bind(use: _Use, table: Table) -> _Bound | list[Problem]:
    entry = table.get(use.name) if use.name is not None else use.import_path
    key = use.import_key if use.name is None else use.name_key
    if entry is None:
        return [_unknown(key, use.what, str(use.name), table, _own(use.what, str(use.name)))]
    try:
        target = import_object(entry) if isinstance(entry, str) else entry
    except ComponentError as error:
        return [Problem(path=key, message=f"{_dotted(key)}: {error}")]
    function = target.function if _is_record(target) else target
    if not callable(function):
        found = f"{entry} is {type(function).__name__}"
        return [Problem(path=key, message=f"{_dotted(key)}: {found}, expected a function or a class")]
    misshapen = _misshapen(function, use) if use.import_path is not None else None
    if misshapen is not None:
        return [Problem(path=key, message=f"{_dotted(key)}: {misshapen}")]
    knobs, wrong = check_knobs(function, use.knobs, num_inputs=use.num_inputs, label=use.what)
    if wrong:
        keys = [((*use.knobs_key, name), message) for name, message in wrong.items()]
        return [Problem(path=key, message=f"{_dotted(key)}: {message}") for key, message in keys]
    return _Bound(target=target, knobs=knobs)


def _misshapen(function: Callable[..., Any], use: _Use) -> str | None:
    """Why something imported cannot be called with the inputs of its kind."""
    named = f"{use.what} {getattr(function, '__qualname__', type(function).__qualname__)}"
    made_of_knobs = is_made_of_knobs(function)
    if inspect.isclass(function) and use.num_inputs and not made_of_knobs and use.what != "monitor":
        return f"{named} is a class without __call__; expected a function, or a frozen dataclass with __call__"
    call: Any = function.__call__ if made_of_knobs else function  # type: ignore[operator]
    try:
        inspect.signature(function)
        parameters = list(inspect.signature(call).parameters.values())[int(made_of_knobs) :]
    except (TypeError, ValueError):
        return f"{named} does not tell its parameters; expected a function or a class written in Python"
    if not use.num_inputs:
        return None
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
        return f"{named} is async; expected a plain function"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < use.num_inputs and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"{named}({', '.join(p.name for p in parameters)}) takes no input; expected it as the first parameter"
    given = {p.name for p in positional[use.num_inputs :] if p.default is p.empty} - set(use.knobs)
    if given and not made_of_knobs:
        return (
            f"{named} needs {', '.join(p.name for p in positional if p.name in given)}, which nothing gives; it is "
            f"called with one record, its first parameter {positional[0].name!r}, and every other parameter is a knob: "
            "read what you need from that record, or give the knobs in kwargs"
        )
    return None


def _own(what: str, name: str) -> str:
    """How to name a component of one's own; empty where there can be none."""
    if what == "environment":
        path = name if "." in name else "my_module.MyEnvironment"
        return f'; or import your own: import_path = "{path}" instead of id'
    if what in ("packer", "trajectory strategy"):
        return '; or import your own: "my_module.name"'
    if what in ("loss", "advantage", "filter", "monitor"):
        return '; or import your own: type = "my_module.name"'
    return ""


def unknown(what: str, name: str, table: Collection[str], own: str = "") -> str:
    """That there is no such name, which is the nearest, and which there are."""
    elsewhere = known_elsewhere(what, name)
    hint = f": here it is {elsewhere}." if elsewhere else nearest(name, table) or "."
    return f"there is no {what} {name!r}{hint} There are {', '.join(sorted(table))}{own}"


def _unknown(key: KeyPath, what: str, name: str, table: Collection[str], own: str = "") -> Problem:
    return Problem(path=key, message=f"{_dotted(key)}: {unknown(what, name, table, own)}")


def _is_record(target: Any) -> bool:
    return dataclasses.is_dataclass(target) and not inspect.isclass(target) and hasattr(target, "function")


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
