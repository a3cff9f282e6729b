"""Runs the model's tool calls. Every failure becomes a message to the model and is counted."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import re
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.core.ctrl_c import is_ctrl_c, noticed
from verbatim.core.errors import ComponentError
from verbatim.core.texts import cut, error_text, nearest, shown
from verbatim.core.types import Message, ToolCall
from verbatim.core.user_code import drop_tracebacks, is_running
from verbatim.core.user_values import as_atom
from verbatim.environments.tools.function_tool import FunctionTool, as_result
from verbatim.environments.tools.mcp import McpTools
from verbatim.environments.tools.tool import Tool, ToolArgumentsError, ToolFailed, ToolResult

MAX_ERROR_CHARACTERS = 500
"""Maximum length, in characters, of an exception's text in an answer to the model."""
_LONGEST_REFUSAL = 16_384
"""Maximum length, in characters, of the answer to a call with invalid arguments."""
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Matches lone surrogates (`os.fsdecode` can return some). They cannot be encoded as UTF-8, so no tokenizer accepts
them."""

_KEYS = ("name", "description", "parameters", "function")
"""The keys that a dict describing a tool may have."""

_UNREADABLE = {
    "invalid_json": "it is not valid JSON",
    "unclosed_block": "it was not closed",
    "missing_name": "it names no tool",
    "malformed_structure": "its name must be a string and its arguments a JSON object",
    "unknown_tool": "there is no such tool",
    "invalid_arguments": "its arguments do not fit the tool",
}


@dataclass(frozen=True, kw_only=True)
class ToolOutcome:
    """The outcome of one tool call."""

    message: Message
    """The tool message for the model."""
    done: bool = False
    """True if the tool ended the episode."""
    reward: float | None = None
    """The reward that the tool gave for the turn, or None if it gave none."""
    error_kind: str | None = None
    """The kind of error under which the call is counted, or None if there was no error: a parse status ("invalid_json",
    ...), "unknown_tool", "invalid_arguments", "exception", "timeout", or "oversize" (the tool ran, but its answer was
    cut)."""
    fault: BaseException | None = None
    """The exception, if it is a fault of the tool and not a `ToolFailed`. The exception's traceback keeps the frames of
    the tool and its callers alive, with all their variables; `verbatim.core.user_code.drop_tracebacks` frees them."""


class ToolManager(Mapping[str, Tool]):
    """The tools of one episode, by name.

    The argument is a list, or a mapping whose keys are ignored. An item may be a `Tool`; anything that `FunctionTool`
    accepts (a typed function, a `functools.partial`, an object with `__call__`); a tool of twinkle, which has
    `tool_info()` and is called with a name and arguments; a dict with `name`, `description`, `parameters` (a JSON
    schema) and `function`; or any other object, whose public methods except `reset` become tools.

    Raises:
        ComponentError: two tools have the same name, or an object is not a tool.
    """

    def __init__(self, tools: Iterable[object] | Mapping[str, object] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        tools = tools.values() if isinstance(tools, Mapping) else tools
        if not isinstance(tools, Iterable) or isinstance(tools, str):
            raise ComponentError(f"ToolManager({tools!r:.80}); expected a list of tools: ToolManager([...])")
        self.register(*tools)

    def register(self, *tools: object) -> None:
        """Add tools. If a tool is invalid, raise the constructor's error and add no tool. The model does not see tools
        that are added during an episode, because the model's prompt has already been rendered."""
        taken = dict(self._tools)
        for tool in (tool for item in tools for tool in _as_tools(item)):
            if tool.name in taken:
                raise ComponentError(
                    f"two tools are called {tool.name!r}; rename one of them, for example "
                    f'FunctionTool(function, name="{tool.name}_2")'
                )
            taken[tool.name] = tool
        self._tools = taken

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def values(self) -> ValuesView[Tool]:
        """Return the tools in the order of registration."""
        return self._tools.values()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Return the tools' schemas for the model, in OpenAI's format."""
        return [tool.schema for tool in self._tools.values()]

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  the tool's deadline becomes an answer, not an error
        output_limit: int | None = None,
    ) -> ToolOutcome:
        """Run one call.

        Args:
            call: The parsed call. A malformed call is answered with an error and not run.
            timeout: Time limit in seconds, or None for no limit. If the tool runs in a thread, the thread cannot be
                stopped at the limit; it is abandoned.
            output_limit: Maximum length of the answer in characters, including the note that it was cut; None for no
                limit.

        Never raises, except CancelledError if the caller is cancelled, and KeyboardInterrupt.
        """
        refusal = self._refuse(call)
        if refusal is not None:
            return _outcome(call, ToolResult(content=f"Error: {refusal[1]}"), refusal[0], output_limit)
        tool = self._tools[str(call.name)]
        if isinstance(tool, FunctionTool) and tool.is_immediate:
            # The tool is called here and not in a task of its own, because creating a task would cost more than the
            # call. So a tool that cancels the current task cancels the caller's: a change of `_cancelling()` reveals
            # that.
            cancelling = _cancelling()
            context = contextvars.copy_context()
            with noticed() as by_ctrl_c:
                value, error = _called(functools.partial(context.run, tool.at_once, dict(call.arguments or {})))
            if _cancelling() > cancelling:
                await _take_back(cancelling, by_ctrl_c())
                value, error = None, asyncio.CancelledError()
            elif error is not None:
                contained = _contained(error, asyncio.current_task())
                if contained is not error:
                    contained.__cause__ = error
                error = contained
            if type(value) is ToolResult or not inspect.isawaitable(value):
                kind, result, fault = _settled(value, error, tool)
                return _outcome(call, result, kind, output_limit, fault)
            # Await the returned value in the context of the call, so that it sees the context variables that the call
            # set.
            awaiting = _run(functools.partial(_awaited, value))
            task = asyncio.get_running_loop().create_task(awaiting, context=context)
        else:
            task = asyncio.ensure_future(_run(functools.partial(tool, dict(call.arguments or {}))))
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            # Cancel the task but do not await it: a coroutine that swallows its cancellation would block the episode
            # forever.
            task.cancel()
            task.add_done_callback(_forget)
            text = f"Error: {tool.name} did not answer within {timeout:g} seconds. Try something smaller."
            return _outcome(call, ToolResult(content=text), "timeout", output_limit)
        kind, result, fault = _settled(*_called(task.result), tool)
        return _outcome(call, result, kind, output_limit, fault)

    def _refuse(self, call: ToolCall) -> tuple[str, str] | None:
        if call.status != "ok":
            return call.status, f"the tool call could not be read: {_UNREADABLE[call.status]}. Send it again."
        if call.name not in self._tools:
            name = str(call.name)[:80]
            hint = nearest(name, self._tools)
            return (
                "unknown_tool",
                f"there is no tool {name}; available: {', '.join(self._tools) or 'none'}{hint or '.'}",
            )
        return None


async def _run(begin: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
    task = asyncio.current_task()
    try:
        return await begin()
    except BaseException as error:  # in a task, SystemExit and KeyboardInterrupt would end the whole run
        contained = _contained(error, task)
        if contained is error:
            raise
        raise contained from error


def _contained(error: BaseException, task: asyncio.Task[Any] | None) -> BaseException:
    """Return a RuntimeError instead of a tool's BaseException that would end the run. Return any other exception, and
    Ctrl-C, unchanged."""
    if isinstance(error, Exception | asyncio.CancelledError) or is_ctrl_c(error):
        return error
    if isinstance(error, GeneratorExit) and not is_running(task):  # Python closes a coroutine that was never finished
        return error
    if isinstance(error, SystemExit):
        return RuntimeError(f"it called sys.exit({shown(error.code, 80)})")
    return RuntimeError(f"it raised {error_text(error)}")


async def _awaited(value: Awaitable[Any]) -> ToolResult:
    return as_result(await value)


def _called(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call the function. Return (return value, None), or (None, exception) if it raised one."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001  `_settled` raises again what is not the tool's failure
        return None, error


def _cancelling() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def _take_back(before: int, by_ctrl_c: bool) -> None:
    """Undo a cancellation of the caller's task by a tool that ran in this task. A cancellation from outside is raised
    again. Ctrl-C, which asyncio turns into a cancellation, is raised again too.

    Args:
        before: Value of `task.cancelling()` before the call.
        by_ctrl_c: True if Ctrl-C was pressed during the call.
    """
    task = asyncio.current_task()
    assert task is not None
    own = 0 if by_ctrl_c else task.cancelling() - before
    with contextlib.suppress(asyncio.CancelledError):  # the tool's cancel() is delivered at the next await: this one
        await asyncio.sleep(0)
    for _ in range(own):
        task.uncancel()
    if task.cancelling() > before:
        raise asyncio.CancelledError


def _settled(
    given: object, error: BaseException | None, tool: Tool
) -> tuple[str | None, ToolResult, BaseException | None]:
    """Return (error kind, result, fault) of a finished tool, in the sense of `ToolOutcome`. Raises `error` again if it
    is neither an Exception nor a cancellation."""
    fault: BaseException | None
    if error is None:
        result = ToolResult(content=given) if isinstance(given, str) else given
        content, done = getattr(result, "content", None), getattr(result, "done", None)
        if not isinstance(result, ToolResult) or not isinstance(content, str):
            text = f"it returned {type(content if isinstance(result, ToolResult) else result).__name__}, not text"
        elif not isinstance(done, bool | np.bool_):
            text = f"it returned done={shown(done, 80)}, not True or False"
        else:
            return None, result, None
        fault = TypeError(f"{tool.name} failed: {text}")
    elif isinstance(error, ToolArgumentsError):
        drop_tracebacks(error)
        text = f"Error: {tool.name}: {cut(str(error), _LONGEST_REFUSAL)}"
        return "invalid_arguments", ToolResult(content=text), None
    elif isinstance(error, ToolFailed):
        drop_tracebacks(error)
        text, fault = str(error), None
    elif isinstance(error, asyncio.CancelledError):
        drop_tracebacks(error)
        # The tool awaited something that was cancelled. Report a new error, without the frames of the original one.
        text, fault = error_text(error), asyncio.CancelledError("what it awaited was cancelled")
    elif isinstance(error, Exception):
        text, fault = error_text(error, MAX_ERROR_CHARACTERS), error
    else:
        raise error
    return "exception", ToolResult(content=f"Error: {tool.name} failed: {text}"), fault


def _outcome(
    call: ToolCall, result: ToolResult, kind: str | None, limit: int | None, fault: BaseException | None = None
) -> ToolOutcome:
    content: str = as_atom(result.content)
    content = content if content.isascii() else _SURROGATES.sub("\ufffd", content)
    if limit is not None and len(content) > limit:
        note = f"\n[cut: the answer had {len(content)} characters]"
        content = content[: max(0, limit - len(note))] + note[:limit]
        kind = kind or "oversize"
    message: Message = {"role": "tool", "content": content, "tool_call_id": call.id}
    if isinstance(call.name, str):
        message["name"] = call.name
    return ToolOutcome(message=message, done=result.done, reward=result.reward, error_kind=kind, fault=fault)


def _as_tools(item: object) -> list[Tool]:
    if isinstance(item, Tool) and isinstance(getattr(item, "name", None), str) and isinstance(item.schema, Mapping):
        return [item]
    if isinstance(item, ToolManager | McpTools):
        inside = ".values()" if isinstance(item, ToolManager) else ".tools"
        raise ComponentError(
            f"a {type(item).__name__} holds tools, but is not a tool itself; give the tools that it holds: "
            f"ToolManager([*source{inside}])"
        )
    if isinstance(item, Mapping):
        return [_described(item)]
    if callable(item) and not isinstance(item, type):
        return [_of_twinkle(item) if callable(getattr(item, "tool_info", None)) else FunctionTool(item)]
    methods = [] if isinstance(item, type) else _public_methods(item)
    if not methods:
        raise ComponentError(
            f"{item!r:.80} is not a tool; expected a typed function, an object with name, schema and "
            "`async def __call__(arguments)`, a dict with a function, or an object with public "
            "methods"
        )
    return [FunctionTool(method) for method in methods]


def _described(item: Mapping[str, Any]) -> FunctionTool:
    """Create a tool from the dict that describes it."""
    unknown = [key for key in item if key not in _KEYS]
    if unknown or not callable(item.get("function")):
        found = f"the key {unknown[0]!r}" if unknown else f"the function {item.get('function')!r:.80}"
        raise ComponentError(
            f"a tool given as a dict has {found}; expected {', '.join(_KEYS)}; `function` must be "
            "callable, the others are optional"
        )
    return FunctionTool(**item)


def _of_twinkle(item: Any) -> FunctionTool:
    """Create a tool from an object of twinkle: `tool_info()` returns the schema, and `(tool_name, arguments)` calls
    the object."""
    info = item.tool_info()
    function = info.get("function") if isinstance(info, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ComponentError(
            f"{item!r:.80}: tool_info() gave {info!r:.80}; expected a schema in OpenAI's format, "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        )

    def call(**arguments: Any) -> Any:
        return item(function["name"], arguments)

    return FunctionTool(
        call,
        name=function["name"],
        description=function.get("description") or "",
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )


def _public_methods(item: object) -> list[Callable[..., Any]]:
    """Return an object's public methods, in the order of definition. `reset` is excluded, because it begins an episode
    in classes that were written for other trainers."""
    names = {
        name: None
        for cls in reversed(type(item).__mro__)
        for name, value in vars(cls).items()
        if isinstance(getattr(value, "__func__", value), types.FunctionType)
        and not name.startswith("_")
        and name != "reset"
    }
    return [getattr(item, name) for name in names]


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # marks it as retrieved, or asyncio would log "exception was never retrieved"
