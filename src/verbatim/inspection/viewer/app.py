"""Serves the page and its API: to loopback names only, with every reading on a thread."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
Handler = Callable[[Request, RunView, str], Awaitable[Response]]
"""Answers a request about a run, and the trajectory or the group that its path names."""

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
    """An ASGI application over some runs."""

    def __init__(self, runs: Sequence[RunView], assets: Mapping[str, Asset]) -> None:
        self._runs, self._assets = runs, assets
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="viewer")
        self._handlers: Mapping[tuple[str, ...], Handler] = {
            ("metrics",): self._metrics,
            ("config",): self._plain(RunView.config),
            ("summary",): self._plain(RunView.summary),
            ("facets",): self._plain(RunView.facets),
            ("trajectories",): self._rows,
            ("trajectories", "*"): self._trajectory,
            ("trajectories", "*", "raw"): self._raw,
            ("trajectories", "*", "text"): self._text,
            ("groups", "*"): self._group,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        host = request.headers.get("host", "")
        if _LOOPBACK.fullmatch(host):
            answer = await self._answered(request)
        else:
            answer = _error(403, f"Host: {host[:100]!r} is no name of this machine's loopback")
        answer.headers.update(_HEADERS)
        await answer(scope, receive, send)

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answered(self, request: Request) -> Response:
        try:
            if request.method not in ("GET", "HEAD"):
                return _error(405, f"there is no {request.method[:20]} here, only GET")
            return await self._found(request)
        except LookupError as error:
            return _error(404, str(error.args[0] if error.args else error))
        except VerbatimError as error:
            return _error(400, str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # one answer fails, the page stays
            logger.exception("%s failed", request.url.path)
            return _error(500, error_text(error))

    async def _found(self, request: Request) -> Response:
        """The answer of whatever the path names; a name in it may hold slashes, as %2F."""
        path = request.scope["raw_path"].decode("ascii").removeprefix("/")
        match [unquote(part) for part in path.split("/")]:
            case ["api", "runs"]:
                return await self._answer(lambda: list_runs(self._runs))
            case ["api", "runs", number, *rest] if re.fullmatch("[0-9]+", number):
                shape = tuple("*" if place == 1 else part for place, part in enumerate(rest))
                if (handler := self._handlers.get(shape)) is not None:
                    return await handler(request, self._run(number), rest[1] if len(rest) > 1 else "")
        return self._asset(unquote(path) or INDEX)

    # ---- endpoints

    def _plain(self, read: Callable[[RunView], dict[str, Any]]) -> Handler:
        async def handle(request: Request, run: RunView, name: str) -> Response:
            return await self._answer(lambda: read(run))

        return handle

    async def _metrics(self, request: Request, run: RunView, name: str) -> Response:
        after = _integer(request, "after", None)
        return await self._answer(lambda: run.metrics(after))

    async def _rows(self, request: Request, run: RunView, name: str) -> Response:
        offset, limit = _integer(request, "offset", 0), _integer(request, "limit", 100)
        query = request.query_params
        sort = query.get("sort", "")
        filters = Filters.of({each: query.getlist(each) for each in query if each not in _NO_FILTERS})
        assert offset is not None and limit is not None
        return await self._answer(lambda: run.rows(filters, sort=sort, offset=offset, limit=limit))

    async def _trajectory(self, request: Request, run: RunView, name: str) -> Response:
        turn, offset = _integer(request, "turn", None), _integer(request, "offset", 0)
        if turn is None:
            return await self._answer(lambda: run.trajectory(name))
        return await self._answer(lambda: run.part(name, turn, offset or 0))

    async def _raw(self, request: Request, run: RunView, name: str) -> Response:
        answer = await self._answer(lambda: run.raw(name))
        safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:80]
        answer.headers["Content-Disposition"] = f'attachment; filename="trajectory-{safe}.json"'
        return answer

    async def _text(self, request: Request, run: RunView, name: str) -> Response:
        path = request.query_params.get("path", "")
        return await self._answer(lambda: run.text(name, path))

    async def _group(self, request: Request, run: RunView, name: str) -> Response:
        return await self._answer(lambda: run.group(name))

    def _asset(self, name: str) -> Response:
        asset = self._assets.get(name)
        if asset is None:
            raise LookupError(f"there is no /{name[:100]}")
        return Response(asset.data, media_type=asset.content_type)

    # ---- shared

    def _run(self, text: str) -> RunView:
        number = int(text[:9])
        if number >= len(self._runs):
            raise LookupError(f"there is no run {number}; there are 0 to {len(self._runs) - 1}")
        return self._runs[number]

    async def _answer(self, read: Callable[[], Any]) -> Response:
        """What `read` gives, as JSON; both are made on a thread."""
        data = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: to_json(read()))
        return Response(data, media_type=_JSON)


def _error(status: int, message: str) -> Response:
    return Response(to_json({"error": message}), status, media_type=_JSON)


def _integer(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise UsageError(f"{name}: expected an integer")
    return int(text)
