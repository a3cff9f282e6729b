"""Serves the chat protocols on top of a sampler, with and without streaming."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verbatim.core.errors import VerbatimError
from verbatim.core.tasks import cancel_all, run_together
from verbatim.core.texts import cut
from verbatim.core.types import Int32, StopReason
from verbatim.inference.chat.chat_protocol import ChatProtocol
from verbatim.inference.chat.live import LiveAnswer
from verbatim.inference.chat.protocol import ChatReply, ChatStream, Options, Stamp
from verbatim.inference.chat.protocols import COUNT, ChatProtocols
from verbatim.inference.chat.stops import Decode, watch_for
from verbatim.inference.chat.streaming import StreamDiverged
from verbatim.inference.http.chat_work import RenderedRequest, read_chat, read_completion, read_partial
from verbatim.inference.http.exchange import (
    STOPPING,
    ClientGone,
    ResponseWriter,
    StopEvent,
    json_answer,
    read_body,
    while_there,
)
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.protocol import GENERATE
from verbatim.inference.http.refused import Refused
from verbatim.inference.http.render_pool import RenderPool
from verbatim.inference.sampler import Completion, Sampler, SampleRequest, Watch, generate_watched

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE = 2000  # maximum length of an error in a response, in characters


class ChatRoutes:
    """The endpoints of all chat protocols.

    Args:
        sampler: The sampler that generates.
        render_pool: Renders conversations and parses completions; None if the server has no renderer.
        decode: The renderer's `decode`, called on the sampler's thread to find stop strings; None if the server has no
            renderer.
        model: The model's name in requests.
        limits: Limits of one client.
        options: Which unenforceable fields are accepted, and the maximum number of replies per response.
        draw_seed: Returns a random seed for requests that have none.
        stopped: Set when the server stops.
    """

    def __init__(
        self,
        sampler: Sampler,
        render_pool: RenderPool | None,
        decode: Decode | None,
        *,
        model: str,
        limits: ServerLimits,
        options: Options,
        draw_seed: Callable[[], int],
        stopped: StopEvent,
    ) -> None:
        self._sampler, self._render_pool, self._decode = sampler, render_pool, decode
        self._model, self._limits = model, limits
        self._draw_seed, self._stopped = draw_seed, stopped
        self.protocols = ChatProtocols(options)
        self.refused: Counter[str] = Counter()
        """Number of requests, by protocol and by the field that was refused, or accepted but not enforced."""

    async def answer(self, request: Request) -> Response:
        """Answer a request in the protocol of its path."""
        protocol = self.protocols.of(request.url.path.removeprefix("/v1/"))
        try:
            return await self._answer(request, protocol)
        except Refused as refusal:
            if refusal.counted_as:
                self.refused[f"{protocol.name}/{refusal.counted_as}"] += 1
            raise

    async def _answer(self, request: Request, protocol: ChatProtocol) -> Response:
        """Read and render the request in the render pool. Then do what the request asks for: count the prompt's tokens,
        stream a response, or return a complete response."""
        if self._render_pool is None:
            raise Refused(
                404, f"this server was started without a renderer, so it takes token ids only: POST {GENERATE}"
            )
        room = self._sampler.context_length
        data = bytes(await read_body(request, self._limits.chat_body(room), self._limits))
        is_count = request.url.path.endswith(COUNT)
        asked = await while_there(
            request.receive,
            self._stopped,
            self._render_pool.run(
                len(data),
                read_chat,
                data,
                dict(request.headers),
                protocol,
                model=self._model,
                room=room,
                vocab_size=self._sampler.vocab_size,
                is_count=is_count,
            ),
        )
        self.refused.update(f"{protocol.name}/unenforced/{field}" for field in asked.request.unenforced)
        if is_count:
            return json_answer(self.protocols.anthropic.count(len(asked.prompt_ids)))
        stamp = Stamp(created=int(time.time()), model=self._model)
        if asked.request.stream:
            stream = protocol.stream(asked.request, stamp)
            return _EventStream(protocol, stream, self._stream(asked, stream, stamp), self._stopped)
        replies = await while_there(request.receive, self._stopped, self._replies(asked, stamp))
        return json_answer(protocol.answer(asked.request, replies, stamp))

    # ---- sampling

    async def _replies(self, asked: RenderedRequest, stamp: Stamp, live: LiveAnswer | None = None) -> list[ChatReply]:
        """Sample all replies concurrently, and parse them. Ids are passed to `live` as they are sampled."""
        seeds = self._seeds(asked)
        shows = [None if live is None else partial(live.show, number) for number in range(len(seeds))]
        drawing = (self._sample(asked, seed, show) for seed, show in zip(seeds, shows, strict=True))
        return await self._read(asked, await run_together(drawing), seeds, stamp)

    async def _sample(self, asked: RenderedRequest, seed: int, show: Watch | None) -> Completion:
        """Sample one completion. If the sampler can show tokens (`ShowsTokens`), sampling stops at the token that
        completes a stop string."""
        request = SampleRequest(
            prompt_ids=asked.prompt_ids, params=asked.params, seed=seed, session=asked.request.session
        )
        assert self._decode is not None
        watch = watch_for(asked.request.stop, self._decode, show)
        completion = await generate_watched(self._sampler, request, watch)
        if completion.stop_reason is StopReason.CANCELLED:
            raise Refused(503, STOPPING)
        return completion

    def _seeds(self, asked: RenderedRequest) -> list[int]:
        """The seed of each reply: first the request's own seed, then seeds derived from it, so that all replies are
        reproducible."""
        given = asked.request.sampling.seed
        seed = self._draw_seed() if given is None else given
        return [seed, *(random.Random(f"{seed}/{k}").getrandbits(63) for k in range(1, asked.request.n))]

    async def _read(
        self, asked: RenderedRequest, completions: Sequence[Completion], seeds: Sequence[int], stamp: Stamp
    ) -> list[ChatReply]:
        """Parse the completions in the render pool. This work is queued with size 0, ahead of all waiting prompts, so
        that finished completions are not delayed."""
        assert self._render_pool is not None
        return [
            await self._render_pool.run(0, read_completion, asked, completion, seed, f"call_{stamp.id}_{k}")
            for k, (completion, seed) in enumerate(zip(completions, seeds, strict=True))
        ]

    # ---- streams

    async def _stream(self, asked: RenderedRequest, stream: ChatStream, stamp: Stamp) -> AsyncGenerator[bytes]:
        """The events of a response, as tokens are sampled."""
        render_pool, live = self._render_pool, LiveAnswer(asked.request.n, asked.prompt_ids)
        assert render_pool is not None
        working = asyncio.ensure_future(self._replies(asked, stamp, live))
        working.add_done_callback(lambda _: live.wake())  # otherwise `events` would wait for tokens that never come

        async def read(ids: Int32, prompt_ids: Int32) -> tuple[str, str]:
            return await render_pool.run(0, read_partial, asked, ids)

        try:
            shown = live.events(stream, working, read, lambda: working, begins_at_once=True)
            async with contextlib.aclosing(shown) as events:
                async for event in events:
                    yield event
        finally:
            await cancel_all([working])


class _EventStream(Response):
    """Sends events while the client is connected. An error after the first event is sent as an event, because the
    status line has already been sent.

    Args:
        protocol: The request's protocol.
        stream: Formats an error as an event.
        events: The events to send.
        stopped: Set when the server stops.
    """

    def __init__(
        self, protocol: ChatProtocol, stream: ChatStream, events: AsyncGenerator[bytes], stopped: StopEvent
    ) -> None:
        super().__init__()
        self._protocol, self._stream, self._events, self._stopped = protocol, stream, events, stopped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        reply = ResponseWriter(scope, send, self._protocol)
        try:
            await while_there(receive, self._stopped, reply.stream(self._stream, self._events))
            await reply.end()
        except (ClientGone, ConnectionError):
            return
        except Refused as refused:
            await reply.refuse(refused)
        except (VerbatimError, StreamDiverged) as error:
            logger.warning("a stream failed: %s", cut(str(error)))
            await reply.refuse(Refused(500, str(error)[:_LONGEST_MESSAGE]))
