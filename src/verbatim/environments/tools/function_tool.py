"""Builds a tool from a typed Python function. The signature gives the schema, the docstring gives the descriptions, and
the return value becomes the text that the model reads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Set
from enum import Enum
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from verbatim.core.errors import ComponentError
from verbatim.core.texts import shown
from verbatim.core.user_values import as_atom, why_refused
from verbatim.environments.tools.signature import Signature, UnwrappedCallable, read_docstring, read_signature
from verbatim.environments.tools.threads import in_thread
from verbatim.environments.tools.tool import ToolResult

if TYPE_CHECKING:
    from verbatim.environments.tools.json_arguments import JsonArguments


class FunctionTool:
    """A tool made from a function, a method, a `functools.partial` or an object with `__call__`.

    The descriptions of the tool and its arguments come from the docstring (Google, NumPy or Sphinx style) and from
    `Annotated[..., Field(description=...)]`; the docstring takes precedence. The schema is the result of
    `transformers.utils.get_json_schema`, plus defaults, constraints and nested models.

    A coroutine function runs on the event loop. Any other function runs in a thread, so that it may block. With
    `inline=True` it is called on the event loop instead; this suits functions that take only microseconds, which is
    less than the cost of using a thread.

    Args:
        function: The callable. Arguments that `functools.partial` has bound are hidden from the model.
        name: The tool's name for the model. By default the function's name or, for an object, the name of its class.
        description: Replaces the docstring's description; "" for no description.
        parameters: A JSON schema of the arguments, for a function whose signature has no types.
        inline: True to call the function on the event loop.
        returns: True to add the schema of the return value under `return`. Most chat templates ignore it.

    Example:
        >>> def guess(number: int) -> str:
        ...     '''Guess the number.
        ...
        ...     Args:
        ...         number: From 1 to 15.
        ...     '''
        ...     return "higher"
        >>> FunctionTool(guess).schema["function"]["parameters"]["properties"]
        {'number': {'type': 'integer', 'description': 'From 1 to 15.'}}

    Raises:
        ComponentError: a parameter has no type, or a type without a JSON form; the function has `*args` or `**kwargs`;
            or `parameters` is not a JSON schema.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        inline: bool = False,
        returns: bool = False,
    ) -> None:
        if not callable(function):
            raise ComponentError(
                f"FunctionTool({shown(function, 80)}): a {type(function).__name__} cannot be called; "
                "give the function itself, without parentheses: FunctionTool(thing.look)"
            )
        if inspect.isclass(function):
            name = function.__name__
            raise ComponentError(
                f"FunctionTool({name}): a class is not a tool; give a function or method: FunctionTool({name}().method)"
            )
        subject = UnwrappedCallable.of(function)
        self._function = function
        self._inline = inline
        self._is_async = inspect.iscoroutinefunction(subject.function)
        self.name: str = name or subject.name
        self._arguments: Signature | JsonArguments
        documented, value = "", None
        if parameters is not None:
            from verbatim.environments.tools.json_arguments import JsonArguments  # here: most tools need no jsonschema

            self._arguments = JsonArguments(parameters, f"tool {self.name}")
            documented = read_docstring(subject.doc, tuple(parameters.get("properties", ()))).description
        else:
            self._arguments = signature = read_signature(subject)
            documented, value = signature.description, signature.returns
        text = (documented if description is None else description).strip()
        self.lacks_description = description is None and not text
        """True if neither the docstring nor `description` describes the tool; `description=""` counts as a
        description."""
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                **({"description": text} if text else {}),
                "parameters": self._arguments.schema,
                **({"return": value} if returns and value is not None else {}),
            },
        }

    def __repr__(self) -> str:
        return f"FunctionTool({self.name!r})"

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Validate the arguments, run the function, and convert its return value with `as_result`.

        Raises:
            ToolArgumentsError: the arguments do not fit the signature.
            TypeError: the function returned a value without a JSON form.
        """
        call = self._call(arguments)
        value = call() if self._is_async or self._inline else await in_thread(call)
        return as_result(await value if inspect.isawaitable(value) else value)

    @property
    def is_immediate(self) -> bool:
        """True if `at_once` may be called: the function is not async, and has `inline=True` and no overridden
        `__call__`."""
        return self._inline and not self._is_async and type(self).__call__ is FunctionTool.__call__

    def at_once(self, arguments: Mapping[str, Any]) -> ToolResult | Awaitable[Any]:
        """Run the function without creating a task. Return its result, or the awaitable that the function returned.

        Raises:
            ToolArgumentsError, TypeError: as for `__call__`.
        """
        value = self._call(arguments)()
        return value if type(value) is ToolResult or inspect.isawaitable(value) else as_result(value)

    def _call(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        by_name = self._arguments.validate(arguments)
        in_order = self._arguments.by_position if isinstance(self._arguments, Signature) else ()
        return functools.partial(self._function, *(by_name.pop(name) for name in in_order), **by_name)


def as_result(value: object) -> ToolResult:
    """Convert a return value: a `ToolResult` is returned unchanged, a string becomes the content, None becomes "", and
    any other value becomes JSON.

    A dataclass, pydantic model or mapping becomes an object, and an enumeration member becomes its value. A set becomes
    a sorted list, because the order of a set differs between processes. Dates, paths and NumPy values are converted
    too.

    >>> as_result({"towns": {"Ulm", "Bonn"}}).content
    '{"towns": ["Bonn", "Ulm"]}'

    Raises:
        TypeError: the value has no JSON form.
    """
    if isinstance(value, ToolResult):
        return value
    value = value.value if isinstance(value, Enum) else value
    if value is None:
        return ToolResult(content="")
    if (why := why_refused(value, of_json=False)) is not None:
        raise TypeError(f"its return value has no JSON form: {why}")
    return ToolResult(
        content=as_atom(value) if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    )


def _plain(value: Any) -> Any:
    """Convert a value to dicts, lists, strings, numbers, booleans and None."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, str | int | float):
        return as_atom(value)
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        made = [(_key(key), _plain(inner)) for key, inner in value.items()]
        # JSON keys are strings: 1 and "1" would silently become one key.
        if len({key if isinstance(key, str) else json.dumps(key) for key, _ in made}) < len(made):
            raise TypeError(f"two keys of {shown(value, 80)} are the same JSON key; return keys that differ as strings")
        return dict(made)
    if isinstance(value, Set):
        return _sorted([_plain(item) for item in value])
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, PathLike):
        return _plain(fspath(value))
    try:
        return to_jsonable_python(value)
    except ValueError as error:
        raise TypeError(f"a {type(value).__name__} has no JSON form; return a string, a dict or a dataclass") from error


def _sorted(items: list[Any]) -> list[Any]:
    """Sort by value, or by JSON text if the values cannot be compared."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=functools.partial(json.dumps, ensure_ascii=False, sort_keys=True))


def _key(key: Any) -> Any:
    plain = _plain(key)
    return plain if plain is None or isinstance(plain, str | int | float) else json.dumps(plain, ensure_ascii=False)
