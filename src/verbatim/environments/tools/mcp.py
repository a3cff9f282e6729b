"""Offers the tools of an MCP server to all episodes, through one session that all event loops share."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.redaction import hide_in, without_secrets
from verbatim.environments.tools.function_tool import FunctionTool
from verbatim.environments.tools.tool import Tool, ToolFailed, ToolResult
from verbatim.environments.tools.variables import EnvFrom, further_variables

INSTALL = "MCP servers need the mcp package: pip install 'verbatim-rl[mcp]'"


class McpTools:
    """The tools of one MCP server, for use inside `with` or `async with`.

    The session with the server has its own thread and event loop, because it outlives the event loops of rollouts. When
    the connection is lost, the calls in progress fail and are not repeated, because the server may have carried them
    out. The next call restarts the server or reconnects.

    Example:
        >>> with McpTools.stdio("python", ["server.py"]) as source:  # doctest: +SKIP
        ...     rollout(trajectories, tool_manager=ToolManager(source.tools))
    """

    def __init__(self, name: str, connect: Callable[[Callable[[], None]], Any], *, prefix: str, timeout: float) -> None:
        if timeout <= 0:
            raise UsageError(f"{name}: connect_timeout = {timeout}; expected more than 0 seconds")
        self.name = name
        """The server's command line or address, without secrets."""
        self._connect, self._prefix, self._timeout = connect, prefix, timeout
        self._stack: ExitStack | None = None
        self._portal: Any = None
        self._session: Any = None
        self._tools: tuple[Tool, ...] = ()

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        env_from: EnvFrom = (),
        cwd: str | Path | None = None,
        prefix: str = "",
        connect_timeout: float = 30.0,
    ) -> Self:
        """Create a source whose server runs as a child process and ends with the source.

        Args:
            command: The program.
            args: The program's arguments.
            env: Environment variables for the server, in addition to the few harmless variables that it inherits (PATH,
                HOME, ...).
            env_from: Variables to copy from this process: a list of names, or `{name in the server: name in this
                process}`.
            cwd: The working directory.
            prefix: A prefix for the name of each tool, to distinguish servers whose tools have the same names.
            connect_timeout: Time limit in seconds for the server's first answer.

        Raises:
            UsageError: the command or its arguments have a wrong type, or a variable is not set.
        """
        if not isinstance(command, str) or isinstance(args, str) or not all(isinstance(arg, str) for arg in args):
            raise UsageError(
                f"McpTools.stdio({command!r:.80}, {args!r:.80}); expected a program and a list of its "
                'arguments: McpTools.stdio("python", ["server.py"])'
            )

        server = {"command": command, "args": list(args), "env": further_variables(env, env_from, command), "cwd": cwd}

        def connect(on_end: Callable[[], None]) -> Any:
            from verbatim.environments.tools.mcp_session import start_server

            return start_server(server, on_end)

        return cls(without_secrets(" ".join([command, *args])), connect, prefix=prefix, timeout=connect_timeout)

    @classmethod
    def http(
        cls, url: str, *, headers: Mapping[str, str] | None = None, prefix: str = "", connect_timeout: float = 30.0
    ) -> Self:
        """Create a source for a server that is already running, over streamable HTTP.

        Args:
            url: The endpoint, such as "http://localhost:8000/mcp".
            headers: Headers of each request. From now on, secrets among them are redacted in logs.
            prefix: As for `stdio`.
            connect_timeout: As for `stdio`.
        """

        for name, value in (headers or {}).items():
            hide_in(name, value)

        def connect(on_end: Callable[[], None]) -> Any:
            from verbatim.environments.tools.mcp_session import reach_server

            return reach_server(url, headers or {})

        return cls(without_secrets(url), connect, prefix=prefix, timeout=connect_timeout)

    def __repr__(self) -> str:
        return f"McpTools({self.name!r})"

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the server had at `open` or at the last `refresh`."""
        if self._stack is None:
            raise UsageError(f"{self!r} is not open; write `with {type(self).__name__}.stdio(...) as source:`")
        return self._tools

    def open(self) -> Self:
        """Connect, and list the tools.

        Raises:
            ComponentError: the server cannot be reached, or lists an invalid tool.
            UsageError: the source is open already, or the mcp package is not installed.
        """
        if self._stack is not None:
            raise UsageError(f"{self!r} is open already")
        try:
            from anyio.from_thread import start_blocking_portal

            from verbatim.environments.tools.mcp_session import McpSession
        except ImportError as error:
            raise UsageError(INSTALL) from error
        stack = self._stack = ExitStack()
        try:
            self._portal = stack.enter_context(start_blocking_portal(name="verbatim-mcp"))
            self._session = McpSession(self.name, self._connect, self._timeout)
            stack.enter_context(self._portal.wrap_async_context_manager(self._session.running()))
            self.refresh()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the session and the server's processes. May be called more than once."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def refresh(self) -> None:
        """List the server's tools again. Raises ComponentError as `open` does. `ToolManager`s that exist already keep
        their tools, so that the schemas in rendered prompts stay valid."""
        try:
            self._tools = tuple(
                FunctionTool(
                    partial(self._run, tool.name),
                    name=self._prefix + tool.name,
                    parameters=tool.input_schema,
                    description=inspect.cleandoc(tool.description or ""),
                )
                for tool in self._portal.call(self._session.tools)
            )
        except (ToolFailed, ComponentError) as error:
            raise ComponentError(f"MCP server {self.name}: {error}") from error

    async def _run(self, tool: str, /, **arguments: Any) -> ToolResult:
        """Run a tool on the server. Raises ToolFailed if the call fails, and also if the answer has data that is not
        text."""
        if self._stack is None:
            raise ToolFailed("its source is closed")
        # The call runs on the session's event loop. Cancelling this future cancels the call and notifies the server.
        result = await asyncio.wrap_future(self._portal.start_task_soon(self._session.call, tool, arguments))
        content = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolFailed(content or "it gave no reason")
        if not result.content and result.structured_content is not None:
            content = json.dumps(result.structured_content, ensure_ascii=False)
        return ToolResult(content=content)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        opening = asyncio.create_task(asyncio.to_thread(self.open))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait({opening})  # a thread cannot be stopped: let it finish, then close its session
            await asyncio.to_thread(self.close)
            raise

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)


def _text(block: Any) -> str:
    """Return the text of one content block. Raises ToolFailed if it is not a text block."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    kind = getattr(block.resource if block.type == "resource" else block, "mime_type", None) or "of unknown type"
    raise ToolFailed(
        f"it answered with {block.type} data ({kind}), and only text can be read here. Ask for text, or do without."
    )
