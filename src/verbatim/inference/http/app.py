"""The endpoints of a sampler's server. Each reads a request, samples while the client is connected, and responds."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verbatim.core.errors import UsageError, VerbatimError
from verbatim.core.sampling import MOST_STOP_IDS
from verbatim.core.texts import brief, cut
from verbatim.inference import elsewhere
from verbatim.inference.chat.fields import Fields, read_integer, read_number, read_text
from verbatim.inference.chat.protocol import Options
from verbatim.inference.chat.protocols import model_card, model_list
from verbatim.inference.elsewhere import is_key, key_of
from verbatim.inference.http import completions, protocol
from verbatim.inference.http.chat_routes import ChatRoutes
from verbatim.inference.http.exchange import (
    STOPPING,
    ClientGone,
    StopEvent,
    check_head,
    json_answer,
    read_body,
    while_there,
)
from verbatim.inference.http.json_size import LARGE, MOST_VALUES
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.refused import Refused
from verbatim.inference.http.render_pool import RenderPool
from verbatim.inference.http.request_body import check_model, read_json, read_request
from verbatim.inference.pool.replica import SaysLoad
from verbatim.inference.sampler import DescribesEngine, Sampler, failure_of
from verbatim.inference.validation import check_ids, check_temperature
from verbatim.models.renderers.stop_ids import ends_within

if TYPE_CHECKING:
    from verbatim.models.renderers.renderer import Renderer

logger = logging.getLogger(__name__)

_AT_ONCE = 16
"""Number of requests that begin in one pass of the event loop, so that a burst of thousands does not block timers and
sockets."""
_LONGEST_MESSAGE = 2000  # maximum length of an error in a response, in characters
_SCORED = Fields(honoured={"token_ids", "temperature", "model"})
_UPDATE = Fields(honoured={"path", "version"})


class SamplerApp:
    """The ASGI application in front of a sampler. See `server.serve_sampler` for its arguments."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        render_pool: RenderPool | None,
        renderer: Renderer | None,
        model: str,
        api_key: str | None,
        seed: int | None,
        limits: ServerLimits,
        weights_folder: Path | None,
        uploads: Path | None,
        hosts: Collection[str],
        options: Options,
    ) -> None:
        self._sampler = sampler
        self._end_ids = () if renderer is None else renderer.stop_token_ids
        self._model = model
        self._api_key = api_key
        self._limits = limits
        self._weights_folder = None if weights_folder is None else weights_folder.resolve()
        self._uploads = None if uploads is None else uploads.resolve()
        self._hosts = {name.lower() for name in hosts}
        self._random = random.Random(seed)
        self._stopped = StopEvent()
        self._heads = asyncio.Semaphore(_AT_ONCE)
        self._started = int(time.time())
        self._id = uuid.uuid4().hex
        self._chat = ChatRoutes(
            sampler,
            render_pool,
            None if renderer is None else renderer.decode,
            model=model,
            limits=limits,
            options=options,
            draw_seed=lambda: self._random.getrandbits(63),
            stopped=self._stopped,
        )
        self._app = Starlette(
            exception_handlers={HTTPException: self._no_route},
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._contained(self._models)),
                Route("/v1/models/{name:path}", self._contained(self._one_model)),
                *(
                    Route(f"/v1/{route}", self._contained(self._chat.answer), methods=["POST"])
                    for route in self._chat.protocols.by_route
                ),
                Route(protocol.REFUSED, self._contained(self._refused)),
                Route(protocol.SAMPLER, self._contained(self._describe)),
                Route(protocol.LOAD, self._contained(self._load)),
                Route(protocol.GENERATE, self._contained(self._generate), methods=["POST"]),
                Route(protocol.PROMPT_LOGPROBS, self._contained(self._prompt_logprobs), methods=["POST"]),
                Route(protocol.WEIGHTS, self._contained(self._update_weights), methods=["POST"]),
                Route(
                    elsewhere.PREFIX + "{names:path}",
                    self._contained(self._take_upload),
                    methods=["GET", "PUT", "POST"],
                ),
            ],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["path"] != "/health":  # health checks must be answered in time even if the server is busy
            async with self._heads:
                await asyncio.sleep(0)
        await self._app(scope, receive, send)

    def stop(self) -> None:
        """Answer requests in flight with 503 immediately."""
        self._stopped.set()

    # ---- status

    async def _health(self, request: Request) -> Response:
        failure = failure_of(self._sampler)
        return (
            json_answer({"status": "ok", "server": self._id})
            if failure is None
            else self._refusal(request, Refused(503, failure))
        )

    async def _models(self, request: Request) -> dict[str, Any]:
        return model_list(self._card())

    async def _one_model(self, request: Request) -> dict[str, Any]:
        check_model(request.path_params["name"], self._model)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return model_card(self._model, self._sampler.context_length, self._started)

    async def _refused(self, request: Request) -> dict[str, Any]:
        return dict(self._chat.refused)

    async def _describe(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._model,
            "context_length": self._sampler.context_length,
            "vocab_size": self._sampler.vocab_size,
            "policy_version": self._sampler.policy_version,
            "server": self._id,
            "takes_weights": self._takes_weights,
            "takes_uploads": self._uploads is not None,
            "how": dict(self._sampler.how) if isinstance(self._sampler, DescribesEngine) else {},
        }

    async def _load(self, request: Request) -> dict[str, Any]:
        if not isinstance(self._sampler, SaysLoad):
            raise Refused(404, "this server's engine does not report its load")
        return asdict(self._sampler.load())

    # ---- sampling and weights

    async def _generate(self, request: Request) -> dict[str, Any]:
        """Sample a completion for token ids, in vLLM's format."""
        room, vocab_size = self._sampler.context_length, self._sampler.vocab_size
        body = await self._ids_body(request, room)
        sample, logprobs = read_request(
            body,
            seed=self._random.getrandbits(63),
            room=room,
            headers=request.headers,
            end_ids=ends_within(self._end_ids, vocab_size),
        )
        completion = await while_there(request.receive, self._stopped, self._sampler.generate(sample))
        return completions.completion_body(
            completion,
            request_id=read_text(body, "request_id") or str(uuid.uuid4()),
            model=self._model,
            seed=sample.seed,
            num_prompt_tokens=len(sample.prompt_ids),
            policy_version=self._sampler.policy_version,
            logprobs=logprobs,
            server=self._id,
        )

    async def _prompt_logprobs(self, request: Request) -> dict[str, Any]:
        """Score token ids."""
        room = self._sampler.context_length
        body = await self._ids_body(request, room)
        _SCORED.check(body)
        ids = completions.read_ids(body.get("token_ids"), "token_ids", room)
        ids = check_ids(ids, self._sampler.vocab_size, "token_ids")
        asked = read_number(body, "temperature")
        temperature = 1.0 if asked is None else asked
        check_temperature(temperature)
        scoring = self._sampler.prompt_logprobs(ids, temperature)
        scored = await while_there(request.receive, self._stopped, scoring)
        return {
            "logprobs": [None, *scored.tolist()[1:]],  # JSON has no NaN
            "policy_version": self._sampler.policy_version,
            "server": self._id,
        }

    async def _update_weights(self, request: Request) -> dict[str, Any]:
        """Load weights; requires an API key or a configured folder. It is not enough that the client has a loopback
        address, because all clients behind a proxy have a loopback address."""
        if not self._takes_weights:
            raise Refused(
                403,
                "weights are accepted only with an api key, or from the folder that the server was started with "
                "(--weights-folder); this server has neither",
            )
        body = read_json(await read_body(request, self._limits.small_body(), self._limits))
        _UPDATE.check(body)
        path, version = read_text(body, "path"), read_integer(body, "version", least=0)
        if not path or version is None:
            raise UsageError(f'expected {{"path": folder, "version": integer}}, found {brief(body)}')
        await self._sampler.update_weights(await asyncio.to_thread(self._weights_at, path), version)
        return {"policy_version": self._sampler.policy_version, "server": self._id}

    @property
    def _takes_weights(self) -> bool:
        return self._api_key is not None or self._weights_folder is not None

    def _weights_at(self, path: str) -> Path:
        """Resolve a folder, which must be in one of the folders that weights are accepted from."""
        try:
            folder = Path(path).resolve()  # before the check, so that links and ".." cannot lead outside
            os.fsencode(folder)
        except (OSError, ValueError, RuntimeError) as error:  # null characters, link loops, lone surrogates
            raise UsageError(f"path = {brief(path)} is not a path: {error}") from None
        accepted = [place for place in (self._weights_folder, self._uploads) if place is not None]
        if self._weights_folder is not None and not any(map(folder.is_relative_to, accepted)):
            raise Refused(403, f"path = {brief(path)} is outside the folder that weights are accepted from")
        return folder

    async def _take_upload(self, request: Request) -> Response:
        """Receive a part of a published folder from a client whose folders this host cannot read."""
        if request.method != "GET":
            check_head(request, self._limits.upload_body(), self._limits)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                status, body = await elsewhere.take(self._uploads, request.scope, request.receive)
        except TimeoutError:
            raise Refused(408, f"the upload did not arrive within {self._limits.body_seconds:g} s") from None
        except ConnectionError:
            raise ClientGone from None
        return json_answer(body, status)

    # ---- shared by all endpoints

    def _contained(
        self, endpoint: Callable[[Request], Awaitable[dict[str, Any] | Response]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap an endpoint so that it checks the key, responds with JSON, and sends errors in the format of the path's
        protocol."""

        async def contained(request: Request) -> Response:
            answer = await answered(request)
            # Delay refusals, so that a client that keeps repeating an invalid request costs less. Stopping the server
            # ends the delay.
            if 400 <= answer.status_code < 500 and self._limits.refusal_seconds:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.refusal_seconds):
                        await self._stopped.wait()
            return answer

        async def answered(request: Request) -> Response:
            """The endpoint's response, or the response for its error."""
            try:
                if self._stopped.is_set():
                    raise Refused(503, STOPPING)
                if (failure := failure_of(self._sampler)) is not None:
                    raise Refused(503, failure)
                self._check_key(request)
                self._check_host(request)
                found = await endpoint(request)
                return found if isinstance(found, Response) else json_answer(found)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)  # client closed request
            except Refused as error:
                return self._refusal(request, error)
            except VerbatimError as error:
                # If the engine has died, answer 503 with the reason instead of the error that this request got because
                # of it.
                if (failure := failure_of(self._sampler)) is not None:
                    return self._refusal(request, Refused(503, failure))
                status, body = protocol.error_body(error)
                if status >= 500:
                    logger.warning("a request failed: %s", cut(str(error)))
                message = cut(str(error), _LONGEST_MESSAGE)
                return self._refusal(request, Refused(status, message, body["error"]["type"]))
            # Some value passed all checks but is still out of range: a number, a nesting depth or a text.
            except (OverflowError, RecursionError, UnicodeError) as error:
                message = f"the request is invalid: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
                return self._refusal(request, Refused(400, message))

        return contained

    async def _no_route(self, request: Request, error: Exception) -> Response:
        """Refuse an unknown path or method, with an error in the format of the path's protocol."""
        assert isinstance(error, HTTPException)
        texts = {
            404: f"there is nothing at {brief(request.url.path)}",
            405: f"{brief(request.url.path)} does not accept {request.method}",
        }
        answer = self._refusal(request, Refused(error.status_code, texts.get(error.status_code, error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    def _refusal(self, request: Request, refused: Refused) -> Response:
        """An error response in the format of the path's protocol."""
        status, kind = refused.status, refused.kind
        if not kind and not request.url.path.startswith("/v1/"):  # `HttpSampler` knows only these two error types
            kind = "invalid_request_error" if status < 500 else "unavailable"
        form = self._chat.protocols.of(request.url.path.removeprefix("/v1/"))
        answer = json_answer(form.error(status, refused.message, refused.field, kind), status)
        if status in (408, 411):  # the body was not read and its end is unknown, so the connection cannot be reused
            answer.headers["connection"] = "close"
        return answer

    def _check_host(self, request: Request) -> None:
        """Check that the Host header is an IP address or an allowed name, unless the server has a key. This protects
        against DNS rebinding, where the host name of a web page is made to resolve to this server."""
        given = request.headers.get("host")
        if self._api_key is not None or given is None:
            return
        name = given.rpartition("]")[0].lstrip("[") if given.startswith("[") else given.partition(":")[0]
        if name.lower() in self._hosts or "*" in self._hosts:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise Refused(
                403,
                f"Host: {brief(given)} is not a name of this server; start it with --allow-host NAME, or with an api "
                "key",
            ) from None

    def _check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        if not is_key(key_of(request.headers.raw, b"x-api-key"), self._api_key.encode()):
            raise Refused(401, "expected the server's api key, as a bearer token or as x-api-key")

    async def _ids_body(self, request: Request, room: int) -> dict[str, Any]:
        data = await read_body(request, self._limits.ids_body(room), self._limits)
        most = MOST_VALUES + room + MOST_STOP_IDS
        # For a small body, a thread costs more than parsing.
        body = await asyncio.to_thread(read_json, data, most) if len(data) > LARGE else read_json(data, most)
        check_model(body.get("model"), self._model)
        return body
