"""Builds a tool from a typed Python function: the signature gives the schema, the docstring the descriptions."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.errors import ComponentError
from verbatim.texts import shown
from verbatim.tools.base import ToolResult
from verbatim.tools.docstrings import read_docstring
from verbatim.tools.json_arguments import JsonArguments
from verbatim.tools.results import as_result
from verbatim.tools.signature import Signature, Subject, read_signature


class FunctionTool:
    """A tool from a function, a method, a `functools.partial` or an object with `__call__`.

    The description, and those of the arguments, are read from the docstring (Google, NumPy or Sphinx style) and from
    `Annotated[..., Field(description=...)]`; where both describe an argument, the docstring does. The schema is what
    `transformers.utils.get_json_schema` gives, and also carries defaults, constraints and nested models.

    A coroutine function runs on the event loop. Any other function runs in a thread of its own, so that it may
    block; `inline=True` calls it on the loop instead, for work of microseconds, where the thread costs more.

    Args:
        function: The callable. Arguments bound by `functools.partial` are hidden from the model.
        name: Its name for the model; by default the function's, or the class's of an object.
        description: Instead of the docstring's; "" for no description.
        parameters: A JSON schema in place of the signature's types, for a function that has none.
        inline: Call it on the event loop.
        returns: Put the schema of the return value under `return`. Most chat templates ignore it.

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
        ComponentError: a parameter without a type, of a type without a JSON form, or `*args` or `**kwargs`; or
            `parameters` that are not a JSON schema.
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
            raise ComponentError(f"FunctionTool({shown(function, 80)}): a {type(function).__name__} cannot be called; "
                                 "give the function itself, without parentheses: FunctionTool(thing.look)")  # fmt: skip
        if inspect.isclass(function):
            name = function.__name__
            raise ComponentError(f"FunctionTool({name}): a class is no tool; give a function, or a method: "
                                 f"FunctionTool({name}().method)")  # fmt: skip
        subject = Subject.of(function)
        self._function = function
        self._inline = inline
        self._is_async = inspect.iscoroutinefunction(subject.function)
        self.name: str = name or subject.name
        self._arguments: Signature | JsonArguments
        said, value = "", None
        if parameters is not None:
            self._arguments = JsonArguments(parameters, f"tool {self.name}")
            said = read_docstring(subject.doc, tuple(parameters.get("properties", ()))).description
        else:
            self._arguments = signature = read_signature(subject)
            said, value = signature.description, signature.returns
        text = (said if description is None else description).strip()
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
        """Validate the arguments and run.

        `as_result` converts the return value: a string is unchanged, None is "", any other value is JSON.

        Raises:
            ToolArgumentsError: the arguments do not fit the signature.
            TypeError: the function returned a value without a JSON form.
        """
        by_name = self._arguments.validate(arguments)
        in_order = self._arguments.by_position if isinstance(self._arguments, Signature) else ()
        call = functools.partial(self._function, *(by_name.pop(name) for name in in_order), **by_name)
        value = call() if self._is_async or self._inline else await _in_thread(call)
        return as_result(await value if inspect.isawaitable(value) else value)


async def _in_thread(call: Callable[[], Any]) -> Any:
    # Not the loop's pool: a hung tool would block one of its few threads for ever, and keep the process from ending.
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: object, error: BaseException | None) -> None:
        if future.done():  # timed out or cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value: object = None
        failure: BaseException | None = None
        try:
            value = context.run(call)
        except StopIteration as error:  # a future cannot hold it
            failure = RuntimeError(f"the tool raised StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001  passed to the caller, which counts it
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, daemon=True, name="verbatim-tool").start()
    return await future
