"""Adds keys, uploads of weights and packed answers to the HTTP interface of a vLLM server (`--middleware`).

vLLM's own key guards only /v1 and /inference, so anyone who reaches the port could pause the server, load other weights
or call any method of its workers. With this middleware, if the environment variable VERBATIM_KEY holds a key, every
route but /health requires that key.

Uploads (`verbatim_uploads`) are written to VERBATIM_UPLOADS. The token endpoint returns packed answers
(`verbatim_vllm_answers`) on request; if vLLM cannot be patched for this, the reason is logged and the server answers in
vLLM's own format. This module runs in vLLM's processes, where Verbatim is not installed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import verbatim_keys
import verbatim_uploads
import verbatim_vllm_answers
from verbatim_uploads import Receive, Scope

logger = logging.getLogger("vllm.verbatim")
"""A child of vLLM's logger, so that its lines appear in the server's log."""

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware that requires the key on every route but /health, and serves the routes of uploads."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._key = os.environ.get("VERBATIM_KEY") or None
        uploads = os.environ.get("VERBATIM_UPLOADS") or None
        self._uploads = None if uploads is None else Path(uploads)
        if (why := verbatim_vllm_answers.install()) is not None:
            logger.warning("the token endpoint answers in vLLM's own format, not packed: %s", why)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on to vLLM."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            await self._app(scope, receive, send)
        elif not self._is_allowed(scope) and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "this server needs a key (bearer token)"})
        elif not self._is_allowed(scope):
            await _answer(send, 401, {"error": {"message": "this server needs a key (bearer token)", "code": 401}})
        elif scope["type"] == "http" and scope["path"].startswith(verbatim_uploads.PREFIX):
            await _answer(send, *await verbatim_uploads.take(self._uploads, scope, receive))
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        return bool(verbatim_keys.is_key(verbatim_keys.bearer_of(scope["headers"]), self._key.encode()))


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
