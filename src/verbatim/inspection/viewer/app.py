"""Serves the page and its API, and only under loopback host names. Files are read only on threads."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.core.errors import UsageError, VerbatimError
from verbatim.core.texts import error_text
from verbatim.inspection.viewer.assets import INDEX, Asset
from verbatim.inspection.viewer.encoding import to_json
from verbatim.inspection.viewer.query import Filters
from verbatim.inspection.viewer.run_view import RunView, list_runs

logger = logging.getLogger(__name__)
_THREADS = 4
_JSON = "application/json; charset=utf-8"
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_FILTERS = ("offset", "limit", "sort")


class ViewerApp:
    """An ASGI application that shows the given runs."""

    def __init__(self, runs: Sequence[RunView], assets: Mapping[str, Asset]) -> None:
        self._runs, self._assets = runs, assets
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="viewer")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        host = request.headers.get("host", "")
        if _LOOPBACK.fullmatch(host):
            answer = await self._answered(request)
        else:
            answer = _error(403, f"Host: {host[:100]!r} is not a loopback name of this machine")
        answer.headers.update(_HEADERS)
        await answer(scope, receive, send)

    def close(self) -> None:
        """End the threads of the application."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answered(self, request: Request) -> Response:
        try:
            if request.method not in ("GET", "HEAD"):
                return _error(405, f"method {request.method[:20]} is not supported, only GET")
            return await self._found(request)
        except LookupError as error:
            return _error(404, str(error.args[0] if error.args else error))
        except VerbatimError as error:
            return _error(400, str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a request that fails must not end the server
            logger.exception("%s failed", request.url.path)
            return _error(500, error_text(error))

    async def _found(self, request: Request) -> Response:
        """The answer for the resource that the request's path names. A name in the path may contain slashes, encoded as
        %2F."""
        path = request.scope["raw_path"].decode("ascii").removeprefix("/")
        match [unquote(part) for part in path.split("/")]:
            case ["api", "runs"]:
                return await self._answer(lambda: list_runs(self._runs))
            case ["api", "runs", number, *rest] if re.fullmatch("[0-9]+", number):
                shape = tuple("*" if place == 1 else part for place, part in enumerate(rest))
                if (read := _READERS.get(shape)) is not None:
                    run, name = self._run(number), rest[1] if len(rest) > 1 else ""
                    answer = await self._answer(lambda: read(run, name, request))
                    if shape[2:] == ("raw",):
                        safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:80]
                        answer.headers["Content-Disposition"] = f'attachment; filename="trajectory-{safe}.json"'
                    return answer
        asset = self._assets.get(unquote(path) or INDEX)
        if asset is None:
            raise LookupError(f"there is no /{unquote(path)[:100]}")
        return Response(asset.data, media_type=asset.content_type)

    # ---- shared

    def _run(self, text: str) -> RunView:
        number = int(text[:9])
        if number >= len(self._runs):
            raise LookupError(f"there is no run {number}; the runs are 0 to {len(self._runs) - 1}")
        return self._runs[number]

    async def _answer(self, read: Callable[[], Any]) -> Response:
        """Answer with the result of `read` as JSON. The call and the encoding run on a thread, so that the event loop
        is not blocked."""
        data = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: to_json(read()))
        return Response(data, media_type=_JSON)


def _error(status: int, message: str) -> Response:
    return Response(to_json({"error": message}), status, media_type=_JSON)


def _rows(run: RunView, name: str, request: Request) -> Any:
    query = request.query_params
    filters = Filters.of({each: query.getlist(each) for each in query if each not in _NO_FILTERS})
    offset, limit = _integer(request, "offset", 0), _integer(request, "limit", 100)
    return run.rows(filters, sort=query.get("sort", ""), offset=offset, limit=limit)


def _trajectory(run: RunView, name: str, request: Request) -> Any:
    turn, offset = _integer(request, "turn", None), _integer(request, "offset", 0)
    return run.trajectory(name) if turn is None else run.part(name, turn, offset)


def _integer(request: Request, name: str, default: int | None) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise UsageError(f"{name}: expected an integer")
    return int(text)


_READERS: Mapping[tuple[str, ...], Callable[[RunView, str, Request], Any]] = {
    ("metrics",): lambda run, name, request: run.metrics(_integer(request, "after", None)),
    ("config",): lambda run, name, request: run.config(),
    ("summary",): lambda run, name, request: run.summary(),
    ("facets",): lambda run, name, request: run.facets(),
    ("trajectories",): _rows,
    ("trajectories", "*"): _trajectory,
    ("trajectories", "*", "raw"): lambda run, name, request: run.raw(name),
    ("trajectories", "*", "text"): lambda run, name, request: run.text(name, request.query_params.get("path", "")),
    ("groups", "*"): lambda run, name, request: run.group(name),
}
"""The functions that answer requests about a run, by the path after the run's number. `*` stands for the name of a
trajectory or group. The functions are called on a thread."""
