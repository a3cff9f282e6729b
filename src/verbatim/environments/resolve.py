"""From a name and arguments in a configuration to an environment, refusing early and in full."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from verbatim.environments import ENVIRONMENTS
from verbatim.environments.base import Demonstrates, Demonstration, Environment
from verbatim.errors import ComponentError, UsageError

_METHODS = ("examples", "start")


def create_environment(name: str, args: Mapping[str, Any] | None = None) -> Environment:
    """Make the environment that a configuration names.

    Args:
        name: A bundled id ("guess_number"), or an import path ("my_module.MyEnvironment") of a class or function that
            makes one; the current directory is importable.
        args: Its keyword arguments.

    Raises:
        ComponentError: it cannot be imported or called, or what it makes is no environment.
    """
    if name not in ENVIRONMENTS and "." not in name and ":" not in name:
        near = get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ComponentError(
            f"there is no environment {name!r}; bundled: {', '.join(ENVIRONMENTS)}{hint} For one of your own give "
            'import_path = "my_module.MyEnvironment"'
        )
    make = _import(ENVIRONMENTS.get(name, name))
    arguments = _check_arguments(name, make, dict(args or {}))
    try:
        environment = make(**arguments)
    except UsageError:
        raise
    except Exception as error:
        raise ComponentError(f"environment {name!r} raised {type(error).__name__} when it was made with "
                             f"{arguments}: {error}") from error  # fmt: skip
    return _check_environment(name, environment)


def demonstrations_of(environment: Environment, name: str, count: int, seed: int) -> Sequence[Demonstration]:
    """An environment's demonstrations.

    Raises:
        ComponentError: it has none, or gave something else.
    """
    if not isinstance(environment, Demonstrates):
        raise ComponentError(
            f"environment {name!r} shows no demonstrations, which a warm start and [model.build] need; give it "
            "`demonstrations(count, seed) -> list[Demonstration]`, or set warm_start.data and model.name"
        )
    shown = environment.demonstrations(count, seed)
    wrong = next((item for item in shown if not isinstance(item, Demonstration)), None)
    if wrong is not None or len(shown) == 0:
        found = "none" if wrong is None else f"a {type(wrong).__name__}"
        raise ComponentError(f"environment {name!r}: demonstrations({count}, {seed}) gave {found}; expected "
                             f"{count} verbatim.environments.Demonstration")  # fmt: skip
    return shown


def corpus(demonstrations: Sequence[Demonstration]) -> list[str]:
    """Demonstrations as the chat template writes them: the texts that `[model.build]` trains a tokenizer on."""
    from verbatim.models.build import chat_text  # brings torch and transformers

    return [chat_text(shown.messages, shown.tools) for shown in demonstrations]


def _import(path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:  # as `python -m` has it; an installed command does not
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            why = f"there is no module {error.name!r} in the current directory or among the installed packages"
        else:
            why = f"importing it raised {type(error).__name__}: {error}"
        raise ComponentError(f"environment {path!r}: {why}") from error
    if not hasattr(module, attribute):
        names = [key for key in vars(module) if not key.startswith("_")]
        near = get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ComponentError(f"environment {path!r}: module {module_name} has no {attribute!r}{hint}")
    make = getattr(module, attribute)
    if not callable(make):
        raise ComponentError(f"environment {path!r} is a {type(make).__name__}; expected a class, or a function that "
                             "makes an environment")  # fmt: skip
    return make  # type: ignore[no-any-return]


def _check_arguments(name: str, make: Callable[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with values as their annotations want them (a TOML array for a tuple, for example)."""
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(make).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    valid = ", ".join(parameters) or "none"
    problems = []
    for key in args:
        if key not in parameters and not takes_any:
            near = get_close_matches(key, parameters, n=1)
            problems.append(f"there is no argument {key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    problems += [
        f"argument {key!r} is missing"
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in args
    ]
    hints = _hints(make)
    checked = {}
    for key, value in args.items():
        try:
            checked[key] = TypeAdapter(hints[key]).validate_python(value) if key in hints else value
        except (PydanticSchemaGenerationError, PydanticUserError):
            checked[key] = value  # a type of the user's own that pydantic knows nothing about
        except ValidationError as error:
            problems.append(f"argument {key} = {value!r}: {error.errors()[0]['msg']}")
    if problems:
        raise ComponentError(f"environment {name!r}: {'; '.join(problems)}. Its arguments: {valid}")
    return checked


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except (NameError, TypeError, AttributeError):
        return {}  # hints for a type checker only; nothing can be checked by them here


def _check_environment(name: str, environment: object) -> Environment:
    missing = [method for method in _METHODS if not callable(getattr(environment, method, None))]
    if missing:
        raise ComponentError(
            f"environment {name!r} made a {type(environment).__name__}, which has no {' and no '.join(missing)}; "
            "expected `examples(split) -> Sequence[Example]` and `async start(example, seed) -> Episode`"
        )
    assert isinstance(environment, Environment)
    if not inspect.iscoroutinefunction(environment.start):
        raise ComponentError(f"environment {name!r}: start must be `async def start(self, example, seed)`")
    return environment
