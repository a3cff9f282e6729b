"""Creates environments from a configuration's name and arguments, and checks what users' code returns.

Users' classes, examples and demonstrations are checked in full before the run starts, so that a fault in one of them
does not surface in the middle of the run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.core.ctrl_c import users_errors
from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.imports import import_object, is_import_path, told
from verbatim.core.texts import nearest, shown
from verbatim.core.types import Example
from verbatim.core.user_values import why_refused
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.environment import Demonstrates, Demonstration, Environment, Episode
from verbatim.environments.shapes import EXPECTED, adapted, adapter_of, check_arguments, taskset_of
from verbatim.models.renderers.responses import read_json

_METHODS = {"examples": ("split",), "start": ("example", "seed")}
"""Required methods of an environment, with the names of their positional arguments."""


def create_environment(
    name: str, args: Mapping[str, Any] | None = None, table: Mapping[str, Any] = ENVIRONMENTS
) -> Environment:
    """Create the environment that a configuration names.

    Args:
        name: The id of a bundled environment ("guess_number" or "guess-number"), or the import path
            ("my_module.MyEnvironment") of a class or function that creates an environment. Modules in the current
            directory can be imported. The path may also name a class with `reset` and tool methods, a Gymnasium-style
            class, or a reward function.
        args: Keyword arguments of the class or function. In the last three cases of `name` they may include arguments
            of `ToolClass`, `GymnasiumStyle` or `SingleTurn` respectively.
        table: Import path, class or function of each bundled id.

    Raises:
        ComponentError: the name cannot be imported or called, or the result is not an environment.
    """
    name = name if is_import_path(name) else name.replace("-", "_")
    if name not in table and not is_import_path(name):
        raise ComponentError(
            f"there is no environment {name!r}; bundled: {', '.join(table)}{nearest(name, table) or '.'} For one of "
            'your own give import_path = "my_module.MyEnvironment"'
        )
    entry = table.get(name, name)
    make = import_object(entry) if isinstance(entry, str) else entry
    if not callable(make):
        raise ComponentError(
            f"environment {name!r} is a {type(make).__name__}; expected a class, or a function that "
            "makes an environment"
        )
    if (taskset := taskset_of(make)) is not None:
        make, args = import_object(ENVIRONMENTS["verifiers"]), {"taskset": taskset, **dict(args or {})}
    arguments, wrong = check_arguments(make, dict(args or {}))
    if wrong:
        raise ComponentError(f"environment {name!r}: " + "; ".join(f"{key}: {why}" for key, why in wrong.items()))
    adapter = adapter_of(make) if inspect.isclass(make) or inspect.isroutine(make) else None
    if adapter is not None:
        environment = _made(name, functools.partial(adapted, make, adapter, arguments), arguments)
    else:
        environment = _made(name, functools.partial(make, **arguments), arguments)
        if not inspect.isclass(make) and (adapter := adapter_of(environment)) is not None:
            # A function returned an object that needs an adapter. The adapter calls the function again for each
            # episode.
            again = functools.partial(make, **arguments)
            environment = _made(name, functools.partial(adapted, again, adapter, {}), arguments)
    return _check_environment(name, environment)


def _made(name: str, make: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
    """Call a user's class or function, and return the result.

    Raises:
        ComponentError: the call raised an exception; the message has that exception and the line.
    """
    with users_errors(
        lambda error: ComponentError(f"environment {name!r}, created with {shown(arguments)}, raised {told(error)}"),
        UsageError,
    ):
        return make()


def demonstrations_of(environment: Environment, name: str, count: int, seed: int) -> Sequence[Demonstration]:
    """Return `count` demonstrations of an environment, after checking them.

    Raises:
        ComponentError: the environment has no demonstrations, or returned an invalid value.
    """
    if not isinstance(environment, Demonstrates):
        raise ComponentError(
            f"environment {name!r} has no demonstrations, which a warm start and [model.build] need; give it "
            "`demonstrations(count, seed) -> list[Demonstration]`, or set warm_start.data and model.name"
        )
    _check_takes(name, environment.demonstrations, "demonstrations", ("count", "seed"))
    shown = _called(name, environment.demonstrations, count, seed)
    if not isinstance(shown, Sequence) or isinstance(shown, str) or not shown:
        found = "an empty list" if isinstance(shown, Sequence) and not isinstance(shown, str) else _a(shown)
        raise ComponentError(
            f"environment {name!r}: demonstrations({count}, {seed}) gave {found}; expected a list of "
            f"{count} verbatim.environments.Demonstration"
        )
    for number, item in enumerate(shown):
        wrong = _wrong_demonstration(item)
        if wrong is not None:
            raise ComponentError(f"environment {name!r}: number {number} of demonstrations({count}, {seed}): {wrong}")
    return shown


def examples_of(environment: Environment, name: str, split: str) -> Sequence[Example]:
    """Return the examples of one split of an environment, after checking them.

    Raises:
        ComponentError: `examples` raised an exception, or did not return a list of examples with unique ids.
    """
    given = _called(name, environment.examples, split)
    what = f'environment {name!r}: examples("{split}")'
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ComponentError(f"{what} gave {_a(given)}; expected a list of verbatim.Example")
    with users_errors(lambda error: ComponentError(f"{what} cannot be read: {told(error)}")):
        rows = list(given)  # reads a lazy sequence in full: a bad row raises here, not in the middle of a run
    if len(rows) == 0:
        raise ComponentError(
            f'{what} is empty; expected at least one example, as in [Example(id="1", payload={{...}})]'
        )
    seen: set[str] = set()
    for number, row in enumerate(rows):
        if not isinstance(row, Example):
            raise ComponentError(
                f"{what} has {_a(row)} at index {number}; expected a verbatim.Example, as in "
                'Example(id="1", payload={...})'
            )
        if not isinstance(row.id, str):
            raise ComponentError(f"{what} has the id {shown(row.id, 80)} at index {number}; expected a string")
        if row.id in seen:
            raise ComponentError(f"{what} has {row.id!r} twice; ids must be unique")
        seen.add(row.id)
        why = why_refused([row.messages, row.tools]) or why_refused(row.payload, of_json=False)
        if why is not None:
            raise ComponentError(f"{what} has an unusable value in the example at index {number}: {why}")
    return rows


def corpus(demonstrations: Sequence[Demonstration]) -> list[str]:
    """Render demonstrations with the chat template, as strings on which `[model.build]` trains a tokenizer."""
    from verbatim.models.trained_tokenizer import chat_text  # imports torch and transformers

    return [chat_text(shown.messages, shown.tools) for shown in demonstrations]


def _check_environment(name: str, environment: object) -> Environment:
    missing = [method for method in _METHODS if not callable(getattr(environment, method, None))]
    if missing:
        raise ComponentError(
            f"environment {name!r} created a {type(environment).__name__}, which has no {' and no '.join(missing)}; "
            f"{EXPECTED}"
        )
    assert isinstance(environment, Environment)
    for method, given in _METHODS.items():
        _check_takes(name, getattr(environment, method), method, given)
    if not inspect.iscoroutinefunction(environment.start):
        raise ComponentError(
            f"environment {name!r}: start is a plain method; expected `async def start(self, example, seed)`"
        )
    return environment


def _check_takes(name: str, method: Callable[..., Any], called: str, given: Sequence[str]) -> None:
    """Refuse a method that cannot be called with these positional arguments."""
    try:
        inspect.signature(method).bind(*given)
    except ValueError:  # a C function without a signature: it cannot be checked
        return
    except TypeError as error:
        start = "async def" if called == "start" else "def"
        raise ComponentError(
            f"environment {name!r}: {called}{inspect.signature(method)} does not fit: {error}; "
            f"expected `{start} {called}(self, {', '.join(given)})`"
        ) from None


def _called(name: str, method: Callable[..., Any], *given: Any) -> Any:
    """Call a user's method. An exception becomes a `ComponentError` that names the call."""
    arguments = ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in given)
    what = f"environment {name!r}: {method.__name__}({arguments})"
    with users_errors(functools.partial(_told_of, what)):
        value = method(*given)
    if inspect.iscoroutine(value):
        value.close()
        raise ComponentError(f"{what} is async; expected a plain `def {method.__name__}`")
    return value


def _told_of(what: str, error: BaseException) -> ComponentError | UsageError:
    """Return the error to raise for a call that raised `error`. A UsageError keeps its class and message, because it
    was written for the user."""
    if isinstance(error, UsageError):
        return type(error)(f"{what}: {error}")
    return ComponentError(f"{what} raised {told(error)}")


def _wrong_demonstration(item: object) -> str | None:
    """Say in one sentence what is wrong with a demonstration; None if it is valid."""
    if not isinstance(item, Demonstration):
        return f"found {_a(item)}; expected a verbatim.environments.Demonstration"
    if (why := wrong_conversation(item.messages, item.tools)) is not None:
        return why
    offered = {_name_of(tool) for tool in item.tools}
    for message in item.messages:
        for name in map(_name_of, message.get("tool_calls") or ()):
            if name not in offered:
                return (
                    f"it calls {name!r}, which is not among its tools ({', '.join(map(str, offered)) or 'none'}); "
                    "give the schemas that an episode offers: tools=[tool.schema for tool in episode.tools]"
                )
    return None


def wrong_conversation(messages: Any, tools: Any) -> str | None:
    """Say in one sentence what is wrong with a conversation to imitate; None if it is valid. Its messages and schemas
    come from users, so they may be anything.

    >>> wrong_conversation([{"role": "user", "content": ["go"]}], ())
    "message 0 (user) has the content ['go']; expected a text: join a list, or write it with json.dumps"
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"messages is {_a(messages)}; expected a list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'message {number} is {shown(message)}; expected for example {{"role": "user", "content": "..."}}'
        if (why := why_refused(message) or _wrong_calls(message.get("tool_calls"))) is not None:
            return f"message {number}: {why}"
        for key in ("content", "reasoning_content"):
            text = message.get(key)
            if not isinstance(text, str | None):
                return (
                    f"message {number} ({message['role']}) has the {key} {shown(text, 80)}; expected a text: join a "
                    "list, or write it with json.dumps"
                )
        if "content" not in message and not message.get("tool_calls"):
            return f"message {number} ({message['role']}) has no content; expected a text"
    if not any(message["role"] == "assistant" for message in messages):
        return "there is no assistant message to learn from"
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return f"tools is {_a(tools)}; expected a list of tool schemas"
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            hint = "; a tool's schema is its `.schema`" if hasattr(tool, "schema") else ""
            return f"tool {number} is {_a(tool)}; expected a tool schema, a mapping{hint}"
        if (why := why_refused(tool)) is not None:
            return f"tool {number}: {why}"
    return None


def _wrong_calls(calls: Any) -> str | None:
    """Say in one sentence what is wrong with the `tool_calls` of an assistant message; None if they are valid."""
    if not calls:
        return None
    if isinstance(calls, list | tuple) and all(map(_is_call, calls)):
        return None
    return (
        f"its tool_calls are {shown(calls, 120)}; expected a list such as "
        '[{"type": "function", "function": {"name": "look", "arguments": {"at": "Bonn"}}}]'
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    return isinstance(read_json(arguments) if isinstance(arguments, str) else arguments, Mapping)


_ASYNC = {"score": "trajectory", "reply": "message", "run": "agent", "close": ""}
"""The async methods of an episode, each with the name of its argument."""


def wrong_episode(episode: object) -> str | None:
    """Say in one sentence what an episode lacks, before it is played; None if nothing is missing."""
    name = type(episode).__name__
    owns = getattr(episode, "run", None) is not None  # `run` replaces `reply`: only one of the two is needed
    for method, argument in _ASYNC.items():
        if method == ("reply" if owns else "run"):
            continue
        found = getattr(episode, method, None)
        expected = f"`async def {method}(self{', ' if argument else ''}{argument})`"
        if not callable(found) or getattr(found, "__func__", None) is Episode.score:
            return f"the episode, a {name}, has no `{method}`; expected {expected}"
        if inspect.isroutine(found) and not inspect.iscoroutinefunction(inspect.unwrap(found)):
            return f"the episode, a {name}: {method} is a plain method; expected {expected}"
    return None


def _name_of(tool_or_call: Any) -> str | None:
    inner = tool_or_call.get("function", tool_or_call) if isinstance(tool_or_call, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
