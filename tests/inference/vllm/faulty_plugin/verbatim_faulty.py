"""Plants faults into weight updates of a real vLLM server: the one whose name is in the file VERBATIM_TEST_FAULT."""

import json
import os
from pathlib import Path


def register() -> None:
    """Put the faulty engine in the place of the one that takes folders and broadcasts."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry.pop("verbatim_broadcast", None)
    WeightTransferEngineFactory.register_engine("verbatim_broadcast", "verbatim_faulty_engine", "FaultyEngine")


def planted() -> str:
    """The fault of now."""
    return Path(os.environ["VERBATIM_TEST_FAULT"]).read_text().strip()


IGNORED = {("version not advanced", "/update_weight_version"), ("stale prefix", "/reset_prefix_cache")}


class FaultyRoutes:
    """ASGI middleware: routes that say "done" and do nothing."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        fault = planted() if scope["type"] == "http" else ""
        path = scope.get("path")
        if (fault, path) in IGNORED:
            await answer(send, {"success": True})
        elif fault == "stale prefix" and path == "/inference/v1/generate":
            body = json.loads(await read(receive))
            body.pop("cache_salt", None)
            await self._app(with_length(scope, body), once(json.dumps(body).encode()), send)
        else:
            await self._app(scope, receive, send)


async def read(receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def with_length(scope, body):
    rest = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*rest, (b"content-length", str(len(json.dumps(body).encode())).encode())]}


def once(body: bytes):
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if left:
            return left.pop()
        import asyncio

        await asyncio.Event().wait()

    return receive


async def answer(send, body) -> None:
    raw = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
