"""The endpoints of a sampler's server: each reads a request, asks the sampler while the client is there, answers."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verbatim.errors import RecordError, UsageError, VerbatimError
from verbatim.inference import wire
from verbatim.inference.base import Sampler
from verbatim.inference.requests import check_ids, check_temperature, check_version
from verbatim.inference.server_chat import answer_chat, read_chat
from verbatim.inference.server_request import read_request

if TYPE_CHECKING:
    from verbatim.renderers.base import Renderer

logger = logging.getLogger(__name__)
T = TypeVar("T")

SESSION_HEADER = "x-session-id"
"""What clients of vLLM call a session."""
_STOPPING = "the server is stopping"


class _Refused(Exception):
    """A request that ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


class SamplerApp:
    """An ASGI application over a sampler. See `server.serve_sampler` for its arguments."""

    def __init__(
        self, sampler: Sampler, *, renderer: Renderer | None, model: str, api_key: str | None, seed: int | None,
        max_body: int,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._renderer = renderer
        self._model = model
        self._api_key = api_key
        self._max_body = max_body
        self._random = random.Random(seed)
        self._stopped = asyncio.Event()
        self._started = int(time.time())
        self._app = Starlette(routes=[
            Route("/health", self._health),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route(wire.SAMPLER, self._guarded(self._describe)),
            Route(wire.GENERATE, self._guarded(self._generate), methods=["POST"]),
            Route(wire.PROMPT_LOGPROBS, self._guarded(self._prompt_logprobs), methods=["POST"]),
            Route(wire.WEIGHTS, self._guarded(self._update_weights), methods=["POST"]),
        ])  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await self._app(scope, receive, send)

    def stop(self) -> None:
        """Answer what is in flight with 503, now."""
        self._stopped.set()

    # ---- what is told

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "created": self._started, "owned_by": "verbatim",
                "max_model_len": self._sampler.context_length}  # fmt: skip
        return {"object": "list", "data": [card]}

    async def _describe(self, request: Request) -> dict[str, Any]:
        return {"model": self._model, "context_length": self._sampler.context_length,
                "vocab_size": self._sampler.vocab_size, "policy_version": self._sampler.policy_version}  # fmt: skip

    # ---- what is sampled

    async def _generate(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        self._check_model(body)
        sample, logprobs = read_request(
            body,
            seed=self._random.getrandbits(63),
            room=self._sampler.context_length,
            end_ids=self._renderer.stop_token_ids if self._renderer is not None else (),
            session=request.headers.get(SESSION_HEADER, ""),
        )
        completion = await self._while_there(request, self._sampler.generate(sample))
        return wire.completion_body(
            completion,
            request_id=str(body.get("request_id") or uuid.uuid4()),
            model=self._model,
            seed=sample.seed,
            num_prompt_tokens=len(sample.prompt_ids),
            policy_version=self._sampler.policy_version,
            logprobs=logprobs,
        )

    async def _chat(self, request: Request) -> dict[str, Any]:
        if self._renderer is None:
            raise _Refused(404, "this server was started without a renderer, so it takes token ids only: "
                           f"POST {wire.GENERATE}")  # fmt: skip
        body = await self._body(request)
        self._check_model(body)
        asked = read_chat(
            body, self._renderer, room=self._sampler.context_length, seed=self._random.getrandbits(63),
            session=request.headers.get(SESSION_HEADER, ""),
        )  # fmt: skip
        completion = await self._while_there(request, self._sampler.generate(asked.request))
        return answer_chat(asked, completion, self._renderer, model=self._model, created=int(time.time()),
                           policy_version=self._sampler.policy_version)  # fmt: skip

    async def _prompt_logprobs(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        ids = check_ids(wire.read_ids(body.get("token_ids"), "token_ids"), self._sampler.vocab_size, "token_ids")
        temperature = body.get("temperature", 1.0)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise RecordError(f"temperature = {temperature!r:.80}; expected a number above 0")
        check_temperature(temperature)
        scored = await self._while_there(request, self._sampler.prompt_logprobs(ids, float(temperature)))
        return {"logprobs": [None, *scored.tolist()[1:]], "policy_version": self._sampler.policy_version}

    async def _update_weights(self, request: Request) -> dict[str, Any]:
        """A path of this machine is only taken from somebody on it, or with the key."""
        if self._api_key is None and not _is_loopback(request):
            raise _Refused(403, "weights are taken from this machine only, or from anywhere with an api key; start the "
                           "server with one")  # fmt: skip
        body = await self._body(request)
        path, version = body.get("path"), body.get("version")
        if not isinstance(path, str) or type(version) is not int:
            raise UsageError(f'expected {{"path": folder, "version": integer}}, found path = {path!r:.80}, '
                             f"version = {version!r:.80}")  # fmt: skip
        check_version(version)
        await self._sampler.update_weights(Path(path), version)
        return {"policy_version": self._sampler.policy_version}

    # ---- what all have in common

    def _guarded(
        self, endpoint: Callable[[Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint behind the key, its answer as JSON, our errors as OpenAI writes them."""

        async def guarded(request: Request) -> Response:
            try:
                if self._stopped.is_set():
                    raise _Refused(503, _STOPPING)
                self._check_key(request)
                return JSONResponse(await endpoint(request))
            except (_ClientGone, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it
            except _Refused as error:
                return _refusal(error.status, str(error))
            except VerbatimError as error:
                status, body = wire.error_body(error)
                if status >= 500:
                    logger.warning("a request failed: %s", error)
                return _told(status, body)
            except (OverflowError, RecursionError, UnicodeError) as error:  # numbers, depths and texts that are none
                return _refusal(400, f"the request cannot be taken: {type(error).__name__}: {error}")

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise _Refused(401, "expected the server's api key as a bearer token")

    def _check_model(self, body: dict[str, Any]) -> None:
        asked = body.get("model")
        if asked not in (None, self._model):
            raise _Refused(404, f"there is no model {asked!r:.80} here; this server has {self._model!r}")

    async def _body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object, of bounded size."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            # Also keeps web pages out: a browser sends them nothing of this type unless we allowed it.
            raise _Refused(415, "expected a body of content-type application/json")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body:
                raise _Refused(413, f"the request is larger than {self._max_body} bytes")
        try:
            body = json.loads(data, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise UsageError(f"expected a JSON object, found {type(body).__name__}")
        return body

    async def _while_there(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """What the sampler answers; cancelled if the client hangs up or the server stops."""
        working = asyncio.ensure_future(work)
        others = [asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(self._stopped.wait())]
        try:
            await asyncio.wait([working, *others], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if self._stopped.is_set():
                raise _Refused(503, _STOPPING)
            raise _ClientGone
        finally:
            for task in (working, *others):
                task.cancel()
            await asyncio.gather(working, *others, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has hung up; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_loopback(request: Request) -> bool:
    if request.client is None:
        return False
    address = ipaddress.ip_address(request.client.host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _refusal(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "unavailable"
    return _told(status, {"error": {"message": message, "type": kind, "code": status}})


def _told(status: int, body: dict[str, Any]) -> Response:
    """In ASCII: a message may quote what UTF-8 cannot hold."""
    return Response(json.dumps(body), status_code=status, media_type="application/json")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
