"""Keeps one MCP server's session on one event loop: reconnects after a loss, and never sends a call twice."""

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
"""The answer of a restarted HTTP server that has not run the call. Its status, 404, is not passed on."""


@dataclass(eq=False)
class _Link:
    """One connection."""

    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is connected or has failed."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when it has failed, is lost or is closed."""
    failure: str | None = "its source is closed"
    """Why it is not connected; None: connected."""
    client: Any = None
    """The `Client`, once it is connected."""


class McpSession:
    """Calls the tools of one server.

    Args:
        name: The server's name in messages.
        connect: Starts or reaches the server; calls its argument when the server has ended.
        timeout: Seconds for the server to accept a connection, or to list its tools.
    """

    def __init__(self, name: str, connect: Callable[[Callable[[], None]], Streams], timeout: float) -> None:
        self._name, self._connect, self._timeout = name, connect, timeout
        self._group: TaskGroup | None = None
        self._link: _Link | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which the session can be used; ends its connection and tasks."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                yield
            finally:
                self._group = None
                if self._link is not None and self._link.ready.is_set():
                    self._link.over.set()
                else:
                    group.cancel_scope.cancel()

    async def tools(self) -> list[Tool]:
        """The server's present tools; a ToolFailed where it cannot be reached, does not answer, or lists what is no
        tool."""
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
            raise ToolFailed(f"it lists what is no tool of MCP: {_found_wrong(error)}") from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Run one tool; a ToolFailed if the server refused, cannot be reached, was lost meanwhile, or answered with
        what is no result."""
        for is_last in (False, True):
            link = await self._connected()
            try:
                return await link.client.call_tool(name, dict(arguments))
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    link.over.set()
                    raise ToolFailed(
                        "the connection to its server was lost; what was asked may have been done, or "
                        "not. Ask again if that does no harm."
                    ) from error
                if is_last or not _UNKNOWN_SESSION.search(error.message):
                    raise ToolFailed(f"its server refused: {error.message}") from error
                link.over.set()
            except ValidationError as error:
                raise ToolFailed(f"its server answered with what is no result of MCP: {_found_wrong(error)}") from None
            except RuntimeError as error:  # the client's word for a result that the tool's own output schema refuses
                raise ToolFailed(
                    f"its server answered with a wrong result: {cut(printable(str(error)), 300)}"
                ) from None
        raise AssertionError("the second attempt returns or raises")

    async def _connected(self) -> _Link:
        """The connection; if it is lost, all callers wait for the same new one. A task of its own opens it, so that a
        caller that times out does not end it for the others."""
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
        """Open and close one connection in one task, as its cancel scopes require."""
        try:
            with anyio.move_on_after(self._timeout) as patience:
                async with Client(self._connect(link.over.set)) as link.client:
                    patience.deadline = math.inf
                    link.failure = None
                    link.ready.set()
                    await link.over.wait()
            if patience.cancelled_caught:
                link.failure = f"its server did not answer within {self._timeout:g} s"
        except Exception as error:  # noqa: BLE001  transports raise anything; the callers get the reason
            if link.ready.is_set():
                logger.warning("%s: the connection broke: %s", self._name, _reason(error))
            else:
                link.failure = f"its server cannot be reached: {_reason(error)}"
        finally:
            link.over.set()
            link.ready.set()


@asynccontextmanager
async def start_server(server: Mapping[str, Any], on_end: Callable[[], None]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server process; it and its children end with the context. Its end is noticed at once rather than at the
    next call, so that the next call starts a new server."""
    sender, receiver = anyio.create_memory_object_stream[Any](0)

    async def pass_on(read: Any) -> None:
        with suppress(anyio.BrokenResourceError):  # the receiver is closed
            async with sender:
                async for message in read:
                    await sender.send(message)
        on_end()

    # Not sys.stderr: a notebook's has no file descriptor.
    started = stdio_client(StdioServerParameters(**server), errlog=sys.__stderr__)
    async with started as (read, write), anyio.create_task_group() as group:
        group.start_soon(pass_on, read)
        yield receiver, write
        group.cancel_scope.cancel()


@asynccontextmanager
async def reach_server(url: str, headers: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """A server behind streamable HTTP."""
    timeout = httpx2.Timeout(30.0, read=None)  # no read timeout: tools have their own deadline
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=timeout) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def _found_wrong(error: ValidationError) -> str:
    """The first thing that is wrong, in a sentence: where it is, what was found, what was expected."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "the answer"
    return cut(
        printable(f"{where}: found {first['input']!r:.120}, and {first['msg'][:1].lower()}{first['msg'][1:]}"), 300
    )


def _reason(error: BaseException) -> str:
    """The first error of nested exception groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())[:300]
