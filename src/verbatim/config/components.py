"""Resolves a component from its name and parameters in the file, and checks the parameters against its signature.

The tables of components come from the caller, so this package imports none of the components, and no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.config.key_locations import KeyPath, dotted
from verbatim.config.known_names import known_elsewhere
from verbatim.config.parameters import check_parameters, is_made_of_parameters
from verbatim.config.schema import ComponentConfig, RunConfig
from verbatim.core.errors import ComponentError
from verbatim.core.imports import import_object, is_import_path
from verbatim.core.texts import nearest

Table = Mapping[str, Any]
"""Maps a name to a component: a function, a class whose fields are its parameters, a record with a `function`, or the
import path ("module:name") of one of these. An import path defers a slow import until the component is used."""

Problem = tuple[KeyPath, str]
"""A problem: (path of the wrong key, message with what was found and what was expected)."""


@dataclass(frozen=True, kw_only=True)
class ComponentTables:
    """The tables in which component names are looked up."""

    losses: Table
    """The losses, for [trainer.loss]."""
    advantages: Table
    """The advantage functions, for [orchestrator.advantage]."""
    filters: Table
    """The filters, for [[orchestrator.filters]]."""
    strategies: Table
    """The strategies, for orchestrator.trajectory_strategy."""
    environments: Table
    """The environments, for the id of [[orchestrator.train.env]] and [[orchestrator.eval.env]]."""
    environment_arguments: Callable[[Any, Mapping[str, Any]], tuple[dict[str, Any], dict[str, str]]] | None = None
    """Checks the arguments of an environment's class or function. Default: `check_parameters`."""
    monitors: Table
    """The monitors, for the tables below [monitor]."""
    alarms: Table = field(default_factory=dict)
    """The alarms, for the tables below [monitor.alarms]."""
    packers: Table
    """The packers, for trainer.packing."""
    samplers: Table
    """The samplers, for inference.backend."""
    runners: Table
    """The rollout backends, for orchestrator.rollout.backend."""
    renderers: Collection[str]
    """The names of the renderers, for the name of [orchestrator.renderer]. There are only names here, because a
    renderer can be built only for a given tokenizer."""


def resolve(component: ComponentConfig, table: Table, *, what: str, where: str) -> Any:
    """The component with its parameters bound.

    For a function or a monitor class, the result is a `functools.partial`; a monitor class is not called yet, because
    its constructor takes the input. For any other class (a frozen dataclass with `__call__`), the result is an
    instance. For a record with `function` and `parameters`, as in `LOSSES`, the result is a copy with its parameters
    set.

    Args:
        component: The component's table in the file.
        table: The built-in components.
        what: The kind of component, for errors: "loss".
        where: The key, for errors: "trainer.loss".

    Raises:
        ComponentError: the name is unknown, an import fails, or a parameter is unknown, missing or has the wrong type.
    """
    target, parameters, problems = _bind(_use(component, what, tuple(where.split("."))), table)
    if problems:
        raise ComponentError("\n".join(f"{dotted(key)}: {message}" for key, message in problems))
    if is_made_of_parameters(target):
        try:
            return target(**parameters)
        except (TypeError, ValueError) as error:
            raise ComponentError(f"{where}: {what} {target.__qualname__} refuses {parameters}: {error}") from error
    if _is_record(target):
        return dataclasses.replace(target, parameters={**target.parameters, **parameters})
    return functools.partial(target, **parameters)


def check_components(config: RunConfig, tables: ComponentTables) -> list[Problem]:
    """All problems with the components that a run names. Custom modules are imported, but nothing is called."""
    found: list[Problem] = []
    for use, table in _uses(config, tables):
        target, parameters, problems = _bind(use, table, tables.environment_arguments)
        found += problems
        if not problems and use.what == "loss":
            found += _unfit_loss(config, target, parameters)
        if not problems and use.what == "advantage" and getattr(target, "compares_rewards", False):
            found += _group_of_one(config, use)
    found += _unknown_stops(config, tables.alarms)
    renderer = config.orchestrator.renderer.name
    if renderer not in tables.renderers:
        found.append((("orchestrator", "renderer", "name"), unknown("renderer", renderer, tables.renderers)))
    return found


def _unknown_stops(config: RunConfig, table: Table) -> Iterator[Problem]:
    """Report names in `stop` that are not active alarms."""
    alarms = config.monitor.alarms
    off = {name for name, alarm in alarms.components.items() if not alarm.enabled}
    there = sorted({*table, *alarms.components} - off) if alarms.enabled else []
    for index, name in enumerate(alarms.stop):
        if name not in there:
            is_off = name in off or not alarms.enabled
            why = "is switched off." if is_off else f"is not an alarm{nearest(name, there) or '.'}"
            names = f" The alarms are {', '.join(there)}" if there else ""
            yield ("monitor", "alarms", "stop", index), f'"{name}" {why}{names}'


def _unfit_loss(config: RunConfig, loss: Any, parameters: Mapping[str, Any]) -> Iterator[Problem]:
    """Report a loss that does not fit the training mode, or for which the data that it learns from is missing.

    Args:
        config: The configuration.
        loss: A `Loss`, or a function of the user's own.
        parameters: The loss's parameters from the file.
    """
    mode, has_teacher = config.orchestrator.training_mode, config.orchestrator.teacher is not None
    component, key = config.trainer.loss, ("trainer", "loss", "type")
    of_mode = getattr(loss, "training_mode", "rl")
    is_chosen = component.type != ComponentConfig().type  # otherwise the training mode chooses its own loss
    reward: str = getattr(loss, "reward_weight", None) or ""
    teacher: str = getattr(loss, "teacher_weight", None) or ""
    if of_mode == "sft" and mode != "sft":
        yield (
            key,
            (
                f'found "{component.type}", which imitates every rollout regardless of its reward; use "default", or '
                "`verbatim sft` with a [warm_start] table"
            ),
        )
    elif mode == "sft" and of_mode != "sft" and is_chosen:
        yield key, f'found "{component.type}", but training_mode = "sft" brings its own loss; remove type'
    elif "opd" in (mode, of_mode):
        if mode != "opd" or (is_chosen and of_mode != "opd" and component.custom_path is None):
            yield (
                key,
                (
                    f'found "{component.type}" and training_mode = "{mode}": distillation is selected by '
                    'training_mode = "opd", which brings its own loss and needs an [orchestrator.teacher] table with a '
                    "model; remove type (kl_tau and delta may stay), "
                    'or give a loss that reads teacher_logprobs with type = "custom"'
                ),
            )
    elif parameters.get(teacher):
        if not has_teacher:
            yield ("trainer", "loss", teacher), "it needs an [orchestrator.teacher] table with a model"
    elif mode == "rl" and parameters.get(reward) == 0:
        yield (
            ("trainer", "loss", reward),
            (
                "found 0, which learns nothing; expected a number above 0, or a teacher to follow instead: an "
                f"[orchestrator.teacher] table and trainer.loss.{teacher} = 1.0"
            ),
        )


def _group_of_one(config: RunConfig, use: _Use) -> Iterator[Problem]:
    """Report a group size of one together with an advantage that compares the rewards within a group."""
    orchestrator = config.orchestrator
    own = [env.advantage for env in orchestrator.train.env]
    is_read = orchestrator.training_mode == "rl" and (use.path != ("orchestrator", "advantage") or None in own)
    if orchestrator.group_size == 1 and is_read and use.path[:2] != ("orchestrator", "eval"):
        yield (
            ("orchestrator", "group_size"),
            (
                f'found 1, which gives every rollout the advantage 0 under "{use.name}": it compares the rewards of a '
                "group; expected at least 2"
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One place in the configuration that names a component."""

    path: KeyPath
    what: str
    name: str
    """A name from the table, or an import path."""
    name_key: KeyPath
    parameters: dict[str, Any]
    parameters_key: KeyPath
    is_own: bool
    """True for a user's own component, given by its import path."""
    num_inputs: int = 1
    """Number of leading positional parameters that receive data; all others are set in the file."""


def _use(component: ComponentConfig, what: str, path: KeyPath) -> _Use:
    custom = component.type == "custom"
    return _Use(
        path=path,
        what=what,
        name=component.custom_path or component.type,
        is_own=component.custom_path is not None,
        name_key=(*path, "import_path" if custom else "type"),
        parameters=component.parameters,
        parameters_key=(*path, "kwargs") if custom else path,
    )


def _use_of_name(name: str, what: str, key: KeyPath, **parameters: Any) -> _Use:
    """A component that a single key names (by name or import path). The code that calls the component passes
    `parameters`."""
    return _Use(
        path=key,
        what=what,
        name=name,
        is_own=is_import_path(name),
        name_key=key,
        parameters=parameters,
        parameters_key=key,
    )


def _uses(config: RunConfig, tables: ComponentTables) -> Iterator[tuple[_Use, Table]]:
    trainer, orchestrator = config.trainer, config.orchestrator
    yield _use(trainer.loss, "loss", ("trainer", "loss")), tables.losses
    yield (
        _use_of_name(trainer.packing, "packer", ("trainer", "packing"), micro_batch_tokens=1, keep_whole=False),
        tables.packers,
    )
    yield _use(orchestrator.advantage, "advantage", ("orchestrator", "advantage")), tables.advantages
    for i, rule in enumerate(orchestrator.filters):
        yield _use(rule, "filter", ("orchestrator", "filters", i)), tables.filters
    for label, monitor in config.monitor.components.items():
        use = _use(monitor, "monitor", ("monitor", label))
        yield dataclasses.replace(use, name_key=use.path) if monitor.type == label else use, tables.monitors
    for label, alarm in config.monitor.alarms.components.items():
        use = _use(alarm, "alarm", ("monitor", "alarms", label))
        yield dataclasses.replace(use, name_key=use.path) if alarm.type == label else use, tables.alarms
    evals = orchestrator.eval.env if orchestrator.eval else ()
    strategies: list[tuple[KeyPath, str | None]] = [(("orchestrator",), orchestrator.trajectory_strategy)]
    for kind, envs in (("train", orchestrator.train.env), ("eval", evals)):
        for i, env in enumerate(envs):
            path: KeyPath = ("orchestrator", kind, "env", i)
            is_own = env.import_path is not None
            use = _Use(
                path=path,
                what="environment",
                name=str(env.import_path if is_own else env.id),
                is_own=is_own,
                num_inputs=0,
                name_key=(*path, "import_path" if is_own else "id"),
                parameters=env.args,
                parameters_key=(*path, "args"),
            )
            yield use, tables.environments
            strategies.append((path, env.trajectory_strategy))
            if env.advantage is not None:
                yield _use(env.advantage, "advantage", (*path, "advantage")), tables.advantages
    for path, name in strategies:
        if name is not None:
            yield _use_of_name(name, "trajectory strategy", (*path, "trajectory_strategy")), tables.strategies


def _bind(use: _Use, table: Table, arguments: Any = None) -> tuple[Any, dict[str, Any], list[Problem]]:
    """Return (1) the component, (2) its converted parameters, and (3) the problems found."""
    entry = use.name if use.is_own else table.get(use.name)
    if entry is None:
        return None, {}, [(use.name_key, unknown(use.what, use.name, table, _own(use.what, use.name)))]
    try:
        target = import_object(entry) if isinstance(entry, str) else entry
    except ComponentError as error:
        return None, {}, [(use.name_key, str(error))]
    function = target.function if _is_record(target) else target
    if not callable(function):
        return None, {}, [(use.name_key, f"{entry} is {type(function).__name__}, expected a function or a class")]
    misshapen = _misshapen(function, use) if use.is_own else None
    if misshapen is not None:
        return None, {}, [(use.name_key, misshapen)]
    if use.what == "environment" and arguments is not None:
        parameters, wrong = arguments(function, use.parameters)
    else:
        given = target.parameters if _is_record(target) else ()
        parameters, wrong = check_parameters(
            function, use.parameters, num_inputs=use.num_inputs, label=use.what, given=given
        )
    return target, parameters, [((*use.parameters_key, name), message) for name, message in wrong.items()]


def _misshapen(function: Callable[..., Any], use: _Use) -> str | None:
    """Why an imported object cannot be called with the inputs of its kind of component; None if it can be called."""
    named = f"{use.what} {getattr(function, '__qualname__', type(function).__qualname__)}"
    made_of_parameters = is_made_of_parameters(function)
    if inspect.isclass(function) and use.num_inputs and not made_of_parameters and use.what != "monitor":
        return f"{named} is a class without __call__; expected a function, or a frozen dataclass with __call__"
    call: Any = function.__call__ if made_of_parameters else function  # type: ignore[operator]
    try:
        inspect.signature(function)
        parameters = list(inspect.signature(call).parameters.values())[int(made_of_parameters) :]
    except (TypeError, ValueError):
        return f"{named} has no readable signature; expected a function or a class written in Python"
    if not use.num_inputs:
        return None
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
        return f"{named} is async; expected a plain function"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < use.num_inputs and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"{named}({', '.join(p.name for p in parameters)}) takes no input; expected it as the first parameter"
    given = {p.name for p in positional[use.num_inputs :] if p.default is p.empty} - set(use.parameters)
    if given and not made_of_parameters:
        return (
            f"{named} needs {', '.join(p.name for p in positional if p.name in given)}, but it is called with a "
            f"single record, its first parameter {positional[0].name!r}; all other parameters are set in the file: "
            "read what you need from that record, or set it in kwargs"
        )
    return None


def _own(what: str, name: str) -> str:
    """How to select a user's own component, as the end of a message; empty for kinds that cannot be extended."""
    if what == "environment":
        path = name if "." in name else "my_module.MyEnvironment"
        return f'; or import your own: import_path = "{path}" instead of id'
    if what in ("packer", "trajectory strategy"):
        return '; or import your own: "my_module.name"'
    if what in ("loss", "advantage", "filter", "monitor", "alarm"):
        return '; or import your own: type = "my_module.name"'
    return ""


def unknown(what: str, name: str, table: Collection[str], own: str = "") -> str:
    """The message for an unknown name, with the nearest valid name and all valid names."""
    elsewhere = known_elsewhere(what, name)
    hint = f": here it is {elsewhere}." if elsewhere else nearest(name, table) or "."
    return f"there is no {what} {name!r}{hint} There are {', '.join(sorted(table))}{own}"


def _is_record(target: Any) -> bool:
    return dataclasses.is_dataclass(target) and not inspect.isclass(target) and hasattr(target, "function")
