"""Reads the body of a request, and works for it only while its client is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from verbatim.inference.http.limits import TINY_CHUNKS, ConnectionLimits, ServerLimits
from verbatim.inference.http.protocol import brief
from verbatim.inference.http.request_body import Refused

T = TypeVar("T")

STOPPING = "the server is stopping"


class ClientGone(Exception):
    """The client has closed its connection."""


def json_answer(body: Mapping[str, Any]) -> Response:
    """A JSON answer. What no UTF-8 can hold, in a text that a client sent, is written as JSON's own escapes."""
    try:
        return JSONResponse(body)
    except UnicodeEncodeError:
        return Response(json.dumps(body), media_type="application/json")


def check_encoding(request: Request) -> None:
    """Refuse a compressed body: it may be small, and large once it is read."""
    encodings = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encodings.lower() not in ("", "identity"):
        raise Refused(
            415,
            f"content-encoding = {brief(encodings)}: compressed bodies are not read; send the body as "
            "it is, without content-encoding",
        )


def check_length(request: Request, most: int) -> None:
    """Refuse a body that is longer than `most` bytes, does not say how long it is, or is compressed."""
    check_encoding(request)
    length = request.headers.get("content-length")
    if length is None:
        raise Refused(411, "expected a content-length; chunked bodies are not accepted")
    if int(length) > most:  # h11 has checked that it is a number
        raise Refused(413, f"the request is larger than {most} bytes, more than a full context of this model can need")


async def read_body(request: Request, most: int, limits: ServerLimits) -> bytearray:
    """Read a JSON body of at most `most` bytes, in time."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        # Also refuses web pages: a browser sends this content-type only where the server has allowed it.
        raise Refused(415, "expected a body of content-type application/json")
    check_length(request, most)
    return await read_whole(request, most, limits)


async def read_whole(
    request: Request, most: int, limits: ConnectionLimits, grow: Callable[[int], None] = lambda size: None
) -> bytearray:
    """Read a body, in chunks too where these are taken.

    Args:
        request: Whose head has come.
        most: Bytes.
        limits: The time for it.
        grow: Told the bytes of a body that does not say its length, as they come; may refuse them.

    Raises:
        Refused: it is compressed, too large, comes too late, or in chunks of a few bytes.
        ClientDisconnect: the client has gone.
    """
    check_encoding(request)
    if "transfer-encoding" in request.headers and not limits.takes_chunks:
        raise Refused(411, "expected a content-length; chunked bodies are not accepted")
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
    """Set when a server stops: ends at once what `while_there` runs until then."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[Callable[[], None]] = set()

    def set(self) -> None:
        """The server stops."""
        super().set()
        for end in list(self._ends):
            end()

    @contextlib.contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` when the server stops in the block."""
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.discard(end)


async def while_there(receive: Receive, stopped: StopEvent, work: Coroutine[Any, Any, T]) -> T:
    """Run some work; cancel it if the client disconnects or the server stops.

    Args:
        receive: Of the request, whose body has been read.
        stopped: Set when the server stops.
        work: What to do for the request; in the task of the caller, as every task more costs tens of microseconds.

    Raises:
        ClientGone: the client has disconnected.
        Refused: the server stops.
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
            watching.exception()  # whatever it is, nothing more can be read
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
    if why is not None:  # the work went on to its end all the same
        task.uncancel()
        raise why
    return result


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
