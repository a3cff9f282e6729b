"""Keeps a session with one MCP server on one event loop. Reconnects when the connection is lost, and never repeats a
call that the server may have carried out."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult, Tool
from pydantic import ValidationError

from verbatim.core.texts import cut, printable
from verbatim.environments.tools.tool import ToolFailed

logger = logging.getLogger(__name__)

Streams = AbstractAsyncContextManager[tuple[Any, Any]]

_UNKNOWN_SESSION = re.compile(r"session (not found|terminated)", re.IGNORECASE)
"""Matches the answer of an HTTP server that was restarted and has not run the call. The text is matched because the
client does not pass on the status 404."""


@dataclass(eq=False)
class _Link:
    """One connection to the server."""

    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when the connection is established or has failed."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when the connection has failed, is lost or is to be closed."""
    failure: str | None = "its source is closed"
    """The reason why there is no connection, or None if connected."""
    client: Any = None
    """The `Client`, or None until connected."""


class McpSession:
    """Calls the tools of one server.

    Args:
        name: The server's name in messages.
        connect: Starts the server or connects to it. Its argument is a function that it must call when the server has
            ended.
        timeout: Time limit in seconds for connecting, and also for listing the tools.
    """

    def __init__(self, name: str, connect: Callable[[Callable[[], None]], Streams], timeout: float) -> None:
        self._name, self._connect, self._timeout = name, connect, timeout
        self._group: TaskGroup | None = None
        self._link: _Link | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which the session can be used. On exit it closes the connection and ends the tasks."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                if self._link is not None and self._link.ready.is_set():
                    self._link.over.set()
                else:  # still connecting, so `_hold` does not wait for `over` yet
                    group.cancel_scope.cancel()

    async def tools(self) -> list[Tool]:
        """Return the tools that the server has now.

        Raises:
            ToolFailed: the server cannot be reached, does not answer, or lists something that is not a tool.
        """
        client = (await self._connected()).client
        found: list[Tool] = []
        cursor: str | None = None
        try:
            with anyio.fail_after(self._timeout):
                while True:
                    page = await client.list_tools(cursor=cursor, cache_mode="refresh")
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
        except TimeoutError:
            raise ToolFailed(f"it did not list its tools within {self._timeout:g} s") from None
        except MCPError as error:
            raise ToolFailed(f"it did not list its tools: {error.message}") from error
        except ValidationError as error:
            raise ToolFailed(f"it lists an invalid MCP tool: {_found_wrong(error)}") from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Run one tool, and return the server's result.

        Raises:
            ToolFailed: the server refused, cannot be reached, was lost during the call, or sent an invalid result.
        """
        for is_last in (False, True):  # twice, only for a restarted HTTP server that does not know the session
            link = await self._connected()
            try:
                return await link.client.call_tool(name, dict(arguments))
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    link.over.set()
                    raise ToolFailed(
                        "the connection to its server was lost; the call may or may not have been carried "
                        "out. Call it again if repeating it does no harm."
                    ) from error
                if is_last or not _UNKNOWN_SESSION.search(error.message):
                    raise ToolFailed(f"its server refused: {error.message}") from error
                link.over.set()
            except ValidationError as error:
                raise ToolFailed(f"its server answered with an invalid MCP result: {_found_wrong(error)}") from None
            except RuntimeError as error:  # the client raises this if a result does not match the tool's output schema
                raise ToolFailed(
                    f"its server answered with a wrong result: {cut(printable(str(error)), 300)}"
                ) from None
        raise AssertionError("the second attempt returns or raises")

    async def _connected(self) -> _Link:
        """Return the connection. If it was lost, all callers wait for the same new connection. A separate task opens
        the new connection, so that a caller that times out does not cancel the connection of the other callers."""
        if self._link is None or self._link.over.is_set():
            if self._group is None:
                raise ToolFailed("its source is closed")
            self._link = _Link()
            self._group.start_soon(self._hold, self._link)
        link = self._link
        await link.ready.wait()
        if link.failure is not None:
            raise ToolFailed(link.failure)
        return link

    async def _hold(self, link: _Link) -> None:
        """Open, hold and close one connection, all in one task, because a cancel scope of anyio must be left by the
        task that entered it."""
        try:
            with anyio.move_on_after(self._timeout) as patience:
                async with Client(self._connect(link.over.set)) as link.client:
                    patience.deadline = math.inf
                    link.failure = None
                    link.ready.set()
                    await link.over.wait()
            if patience.cancelled_caught:
                link.failure = f"its server did not answer within {self._timeout:g} s"
        except Exception as error:  # noqa: BLE001  transports may raise anything; callers get the reason
            if link.ready.is_set():
                logger.warning("%s: the connection was lost: %s", self._name, _reason(error))
            else:
                link.failure = f"its server cannot be reached: {_reason(error)}"
        finally:
            link.over.set()
            link.ready.set()


@asynccontextmanager
async def start_server(server: Mapping[str, Any], on_end: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Context manager around a server process. The process and its children end when the block ends.

    `on_end` is called as soon as the process ends, so that the next call starts a new server instead of failing. To
    notice the end, all messages pass through a stream of our own, whose source runs dry when the process ends.
    """
    sender, receiver = anyio.create_memory_object_stream[Any](0)

    async def pass_on(read: Any) -> None:
        with suppress(anyio.BrokenResourceError):  # the client has closed the receiver
            async with sender:
                async for message in read:
                    await sender.send(message)
        on_end()

    # Not sys.stderr, which has no file descriptor in a notebook.
    started = stdio_client(StdioServerParameters(**server), errlog=sys.__stderr__)
    async with started as (read, write), anyio.create_task_group() as group:
        group.start_soon(pass_on, read)
        yield receiver, write
        group.cancel_scope.cancel()


@asynccontextmanager
async def reach_server(url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """Context manager around a connection to a server over streamable HTTP."""
    timeout = httpx2.Timeout(30.0, read=None)  # no read timeout: `ToolManager.dispatch` has one for each call
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def _found_wrong(error: ValidationError) -> str:
    """Describe the first validation error in one sentence: the place, what was found, and what was expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the answer"
    return cut(
        printable(f"{where}: found {first['input']!r:.120}, and {first['msg'][:1].lower()}{first['msg'][1:]}"), 300
    )


def _reason(error: BaseException) -> str:
    """Describe, in one line, the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())[:300]
