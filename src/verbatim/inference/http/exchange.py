"""Reads the body of a request, runs the work for it while the client is connected, and writes the response."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.core.texts import brief
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.protocol import ChatStream
from verbatim.inference.http.limits import CONNECTION, TINY_CHUNKS, ConnectionLimits, ServerLimits
from verbatim.inference.http.refused import Refused

T = TypeVar("T")

STOPPING = "the server is stopping"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # without this header, nginx would buffer the events
}


class ClientGone(Exception):
    """The client has closed its connection."""


def json_answer(body: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(to_json(body), status, media_type="application/json")


def to_json(body: Mapping[str, Any]) -> bytes:
    """Encode JSON as ASCII with escapes, because text may contain lone surrogates, which UTF-8 cannot encode."""
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


def check_head(request: Request, most: int, limits: ConnectionLimits) -> None:
    """Refuse a request whose head announces a body of more than `most` bytes, a chunked body if the limits do not
    accept chunked bodies, or a compressed body, which may be small on the wire and huge once decompressed."""
    encodings = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encodings.lower() not in ("", "identity"):
        raise Refused(
            415,
            f"content-encoding = {brief(encodings)}: compressed bodies are not accepted; send the body "
            "uncompressed, without content-encoding",
        )
    is_sized = "content-length" in request.headers and "transfer-encoding" not in request.headers
    if not is_sized and not limits.takes_chunks:
        raise Refused(411, "expected a content-length; chunked bodies are not accepted")
    if is_sized and int(request.headers["content-length"]) > most:  # h11 has checked that this is a number
        raise Refused(413, f"the request is larger than {most} bytes")


async def read_body(request: Request, most: int, limits: ServerLimits) -> bytearray:
    """Read a JSON body of at most `most` bytes within the time limit."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        # This also refuses web pages: a browser sends this content-type to another site only if a preflight allows it.
        raise Refused(415, "expected a body of content-type application/json")
    return await read_whole(request, most, limits)


async def read_whole(
    request: Request, most: int, limits: ConnectionLimits, grow: Callable[[int], None] = lambda size: None
) -> bytearray:
    """Read a body, which may be chunked if the limits allow it.

    Args:
        request: The request; only its head has been read.
        most: Maximum number of bytes of the body.
        limits: Sets the time limit, and whether chunked bodies are accepted.
        grow: Called with the size of each chunk of a body without content-length; may raise to refuse the body.

    Raises:
        Refused: the body is compressed, too large, late, or split into chunks of a few bytes.
        ClientDisconnect: the client has disconnected.
    """
    check_head(request, most, limits)
    is_sized = "content-length" in request.headers
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise Refused(413, f"the request is larger than {most} bytes")
                if not is_sized:
                    grow(len(chunk))
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    if request.scope.get("state", {}).get(TINY_CHUNKS):
        raise Refused(411, "expected a content-length, or chunks of at least a few dozen bytes")
    return data


class StopEvent(asyncio.Event):
    """Set when a server stops. Setting it immediately ends all work under `while_there`."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[Callable[[], None]] = set()

    def set(self) -> None:
        """Signal that the server is stopping."""
        super().set()
        for end in list(self._ends):
            end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the server stops while the block runs."""
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.discard(end)


async def while_there(receive: Receive, stopped: StopEvent, work: Coroutine[Any, Any, T]) -> T:
    """Run the work for a request, and cancel it if the client disconnects or the server stops.

    The work runs in the caller's task, because a separate task would cost tens of microseconds. So this function
    cancels the caller's task to end the work, and has to distinguish its own cancellation from a cancellation that
    comes from outside. As in `asyncio.timeout`, it compares the counts of `task.cancelling()`.

    Args:
        receive: ASGI `receive` of the request, whose body has been read.
        stopped: Set when the server stops.
        work: The work for the request.

    Raises:
        ClientGone: the client has disconnected.
        Refused: the server is stopping.
    """
    if stopped.is_set():
        work.close()
        raise Refused(503, STOPPING)
    task = asyncio.current_task()
    assert task is not None
    num_cancelled = task.cancelling()
    why: Exception | None = None

    def end(reason: Exception) -> None:
        nonlocal why
        if why is None:
            why = reason
            task.cancel()

    def gone(watching: asyncio.Task[None]) -> None:
        if not watching.cancelled():
            watching.exception()  # retrieved so that asyncio does not log it; any error means that the client is gone
            end(ClientGone())

    watching = asyncio.ensure_future(_disconnected(receive))
    watching.add_done_callback(gone)
    try:
        with stopped.ending(lambda: end(Refused(503, STOPPING))):
            result = await work
    except (asyncio.CancelledError, Exception):
        if why is None or task.uncancel() > num_cancelled:  # the task itself was cancelled
            raise
        raise why from None
    finally:
        watching.cancel()
    if why is not None:  # the work finished despite the cancellation, which must not leak to the caller
        task.uncancel()
        raise why
    return result


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ResponseWriter:
    """Writes the response to one request. Its methods raise a ConnectionError if the client has disconnected.

    Args:
        scope, send: The ASGI request's scope and send function.
        protocol: Formats errors.
    """

    def __init__(self, scope: Scope, send: Send, protocol: ChatProtocol) -> None:
        self._connection = scope.get("state", {}).get(CONNECTION)
        self._send = send
        self.protocol = protocol
        self._has_begun = False
        self._stream: ChatStream | None = None

    async def whole(self, status: int, body: Mapping[str, Any]) -> None:
        """Write a complete JSON response."""
        data = to_json(body)
        await self._begin(status, {"content-type": "application/json", "content-length": str(len(data))})
        await self._write(data, last=True)

    async def stream(self, stream: ChatStream, events: AsyncGenerator[bytes]) -> None:
        """Write the events of a stream. Call `end` afterwards.

        Args:
            stream: Formats an error as an event.
            events: The events. Empty events are skipped, so that an error before the first event can still be sent with
                its HTTP status.
        """
        self._stream = stream
        async with contextlib.aclosing(events):
            async for event in events:
                if event and not self._has_begun:
                    await self._begin(200, _STREAM_HEADERS)
                if event:
                    await self._write(event)

    async def end(self) -> None:
        """End the stream."""
        await self._write(b"", last=True)

    async def refuse(self, refused: Refused) -> None:
        """Write an error in the protocol's format: as a response, or as the last event if a stream has begun."""
        if not self._has_begun:
            error = self.protocol.error(refused.status, refused.message, refused.field, refused.kind)
            await self.whole(refused.status, error)
        elif self._stream is not None:
            await self._write(self._stream.error(refused.status, refused.message), last=True)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._check()
        self._has_begun = True
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._check()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _check(self) -> None:
        if self._connection is not None and self._connection.is_gone:
            raise ConnectionResetError("the client has closed its connection")
