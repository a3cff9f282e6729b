"""From a name and arguments in a configuration to an environment, refusing early and in full."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from verbatim.config.components import import_object
from verbatim.config.knobs import check_knobs
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.base import Demonstrates, Demonstration, Environment
from verbatim.errors import ComponentError, UsageError

_METHODS = ("examples", "start")


def create_environment(name: str, args: Mapping[str, Any] | None = None) -> Environment:
    """Make the environment that a configuration names.

    Args:
        name: A bundled id ("guess_number", also "guess-number"), or an import path ("my_module.MyEnvironment") of a
            class or function that makes one; the current directory is importable.
        args: Its keyword arguments.

    Raises:
        ComponentError: it cannot be imported or called, or what it makes is no environment.
    """
    if "." not in name and ":" not in name:
        name = name.replace("-", "_")
    if name not in ENVIRONMENTS and "." not in name and ":" not in name:
        near = get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ComponentError(
            f"there is no environment {name!r}; bundled: {', '.join(ENVIRONMENTS)}{hint} For one of your own give "
            'import_path = "my_module.MyEnvironment"'
        )
    make = import_object(ENVIRONMENTS.get(name, name))
    if not callable(make):
        raise ComponentError(f"environment {name!r} is a {type(make).__name__}; expected a class, or a function that "
                             "makes an environment")  # fmt: skip
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


def _check_arguments(name: str, make: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, converted to the types of their parameters (a TOML array to a tuple, for example)."""
    converted, wrong = check_knobs(make, args, num_inputs=0, label="environment")
    if wrong:
        raise ComponentError(f"environment {name!r}: " + "; ".join(f"{key}: {why}" for key, why in wrong.items()))
    return converted


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
