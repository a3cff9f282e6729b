"""Serves the page and its API with aiohttp: to loopback names only, with every reading on a thread."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from verbatim.errors import VerbatimError
from verbatim.texts import error_text
from verbatim.viewer.assets import INDEX, Asset
from verbatim.viewer.encoding import to_json
from verbatim.viewer.query import Filters
from verbatim.viewer.run_view import RunView, list_runs

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_THREADS = 4
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
    """The application over some runs."""

    def __init__(self, runs: Sequence[RunView], assets: Mapping[str, Asset]) -> None:
        self._runs, self._assets = runs, assets
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="viewer")

    def make(self) -> web.Application:
        """The aiohttp application. It closes its threads when it is cleaned up."""
        app = web.Application(middlewares=[self._guard])
        run = "/api/runs/{run:[0-9]+}"
        one = run + "/trajectories/{name}"
        app.router.add_get("/api/runs", self._list)
        app.router.add_get(run + "/metrics", self._metrics)
        app.router.add_get(run + "/config", self._plain(RunView.config))
        app.router.add_get(run + "/summary", self._plain(RunView.summary))
        app.router.add_get(run + "/facets", self._plain(RunView.facets))
        app.router.add_get(run + "/trajectories", self._rows)
        app.router.add_get(one, self._trajectory)
        app.router.add_get(one + "/raw", self._raw)
        app.router.add_get(one + "/text", self._text)
        app.router.add_get(run + "/groups/{name}", self._group)
        app.router.add_get("/{path:.*}", self._asset)
        app.on_cleanup.append(self._clean_up)
        return app

    async def _clean_up(self, app: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- endpoints

    async def _list(self, request: web.Request) -> web.Response:
        return await self._answer(lambda: list_runs(self._runs))

    def _plain(self, read: Callable[[RunView], dict[str, Any]]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            run = self._run(request)
            return await self._answer(lambda: read(run))

        return handle

    async def _metrics(self, request: web.Request) -> web.Response:
        run = self._run(request)
        after = _integer(request, "after", None)
        return await self._answer(lambda: run.metrics(after))

    async def _rows(self, request: web.Request) -> web.Response:
        run = self._run(request)
        offset, limit = _integer(request, "offset", 0), _integer(request, "limit", 100)
        sort = request.query.get("sort", "")
        filters = Filters.of({name: request.query.getall(name) for name in request.query if name not in _NO_FILTERS})
        assert offset is not None and limit is not None
        return await self._answer(lambda: run.rows(filters, sort=sort, offset=offset, limit=limit))

    async def _trajectory(self, request: web.Request) -> web.Response:
        run, name = self._run(request), request.match_info["name"]
        turn, offset = _integer(request, "turn", None), _integer(request, "offset", 0)
        if turn is None:
            return await self._answer(lambda: run.trajectory(name))
        return await self._answer(lambda: run.part(name, turn, offset or 0))

    async def _raw(self, request: web.Request) -> web.Response:
        run, name = self._run(request), request.match_info["name"]
        answer = await self._answer(lambda: run.raw(name))
        safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:80]
        answer.headers["Content-Disposition"] = f'attachment; filename="trajectory-{safe}.json"'
        return answer

    async def _text(self, request: web.Request) -> web.Response:
        run, name = self._run(request), request.match_info["name"]
        path = request.query.get("path", "")
        return await self._answer(lambda: run.text(name, path))

    async def _group(self, request: web.Request) -> web.Response:
        run, name = self._run(request), request.match_info["name"]
        return await self._answer(lambda: run.group(name))

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["path"] or INDEX
        asset = self._assets.get(name)
        if asset is None:
            raise LookupError(f"there is no /{name[:100]}")
        charset = "utf-8" if asset.content_type.startswith("text/") else None
        return web.Response(body=asset.data, content_type=asset.content_type, charset=charset)

    # ---- shared

    def _run(self, request: web.Request) -> RunView:
        number = int(request.match_info["run"][:9])
        if number >= len(self._runs):
            raise LookupError(f"there is no run {number}; there are 0 to {len(self._runs) - 1}")
        return self._runs[number]

    async def _answer(self, read: Callable[[], Any]) -> web.Response:
        """What `read` gives, as JSON; both are made on a thread."""
        data = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: to_json(read()))
        return web.Response(body=data, content_type="application/json", charset="utf-8")

    @property
    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            host = request.headers.get("Host", "")
            answer: web.StreamResponse
            if not _LOOPBACK.fullmatch(host):
                answer = _error(403, f"Host: {host[:100]!r} is no name of this machine's loopback")
            else:
                answer = await _guarded(request, handler)
            answer.headers.update(_HEADERS)
            return answer

        return guard


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.reason)
    except LookupError as error:
        return _error(404, str(error.args[0] if error.args else error))
    except VerbatimError as error:
        return _error(400, str(error))
    except asyncio.CancelledError:
        raise
    except Exception as error:  # one answer fails, the page stays
        logger.exception("%s failed", request.path)
        return _error(500, error_text(error))


def _error(status: int, message: str) -> web.Response:
    return web.Response(
        status=status, body=to_json({"error": message}), content_type="application/json", charset="utf-8"
    )


def _integer(request: web.Request, name: str, default: int | None) -> int | None:
    text = request.query.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise web.HTTPBadRequest(reason=f"{name}: expected an integer")
    return int(text)
