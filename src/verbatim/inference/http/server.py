"""A sampler behind HTTP, for as long as a block lasts: token ids in, token ids out, to whoever may ask.

It runs in the event loop that it is started in, beside whatever else uses the sampler there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.errors import UsageError
from verbatim.inference.base import Sampler
from verbatim.inference.http.limits import ServerLimits, raise_descriptor_limit

if TYPE_CHECKING:
    from verbatim.inference.http.chat_desk import ChatDesk
    from verbatim.renderers.base import Renderer

KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients do, so that none is closed as a request arrives."""
LAST_PORT = 65535
"""Of TCP."""
_BACKLOG = 2048
"""Connections that may wait to be accepted: all episodes of a batch may begin at once."""


@dataclass(frozen=True, kw_only=True)
class SamplerServer:
    """A server that is up."""

    url: str
    """Where: "http://127.0.0.1:40123"; OpenAI's clients want it with "/v1" behind."""
    model: str
    """The model's name in requests."""


@contextlib.asynccontextmanager
async def serve_sampler(
    sampler: Sampler,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    renderer: Renderer | None = None,
    model: str = "policy",
    api_key: str | None = None,
    seed: int | None = None,
    limits: ServerLimits | None = None,
    weights_folder: Path | None = None,
    allow_hosts: Collection[str] = (),
    chat_processes: int = 0,
) -> AsyncIterator[SamplerServer]:
    """Serve a sampler while the block lasts; then what is in flight is cancelled and answered with 503.

    Raises this process's limit of open files as far as the system allows it.

    Args:
        sampler: Whose tokens. It is not closed.
        host: Loopback, unless another address is asked for. Whoever reaches it may sample.
        port: 0 takes a free one.
        renderer: The model's chat format: with it there is /v1/chat/completions, and completions end at its stop ids.
            No other code may use it meanwhile.
        model: The name that requests use.
        api_key: Asked for as a bearer token; None asks for none.
        seed: Of the seeds of requests that bring none; None takes other ones each time.
        limits: What one client may take; None takes the defaults.
        weights_folder: Weights are taken from folders in this one only; None takes them from anywhere, with the key.
        allow_hosts: Names that requests may call the server by, beside its address, `host` and "localhost"; "*" allows
            any. Of importance without a key only.
        chat_processes: Processes that render conversations; 0 renders on a thread, where one long or hostile
            conversation slows down everything else in this process.

    Raises:
        UsageError: the extra `serve` is not installed, the address is taken or not ours, or the renderer cannot be
            made in other processes.
    """
    try:
        import uvicorn

        from verbatim.inference.http.app import SamplerApp
        from verbatim.inference.http.connections import Acceptor, Connection, Places
    except ImportError as error:
        raise UsageError(f"serving a sampler needs {error.name}: pip install 'verbatim-rl[serve]'") from None
    limits = ServerLimits() if limits is None else limits
    places = Places(limits, min(limits.max_connections, raise_descriptor_limit()))
    listening = _listen(host, port)
    try:
        desk = await _open_desk(renderer, chat_processes, limits)
    except BaseException:
        listening.close()
        raise
    app = SamplerApp(
        sampler, desk=desk, end_ids=() if renderer is None else renderer.stop_token_ids, model=model, api_key=api_key,
        seed=seed, limits=limits, weights_folder=weights_folder, hosts={"localhost", host, *allow_hosts},
    )  # fmt: skip
    config = uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none", http="h11",
        proxy_headers=False, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=5,
    )  # fmt: skip

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Listen with an acceptor of our own, in place of asyncio's."""
            self.servers = []
            make = functools.partial(Connection, config=config, server_state=self.server_state, app_state={},
                                     places=places)  # fmt: skip
            self.acceptor = Acceptor(listening, make, places)
            self.started = True
            up.set()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self.acceptor.close()
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Take none: Ctrl-C belongs to whoever owns the event loop."""
            yield

    up = asyncio.Event()
    server = Server(config)
    running = asyncio.create_task(server.serve(sockets=[listening]), name="sampler-server")
    try:
        starting = asyncio.create_task(up.wait())
        await asyncio.wait([running, starting], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            starting.cancel()
            running.result()
        yield SamplerServer(url=_url(host, listening), model=model)
    finally:
        app.stop()
        server.should_exit = True
        await asyncio.shield(running)
        for connection in list(server.server_state.connections):  # of clients that do not read their answers
            connection.transport.abort()
        if desk is not None:
            await desk.close()


async def _open_desk(renderer: Renderer | None, processes: int, limits: ServerLimits) -> ChatDesk | None:
    from verbatim.inference.http.chat_desk import ProcessDesk, ThreadDesk

    if renderer is None:
        return None
    if not processes:
        return ThreadDesk(renderer)
    desk = ProcessDesk(renderer, processes, limits)
    try:
        await desk.start()
    except BaseException:
        await desk.close()
        raise
    return desk


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= LAST_PORT:
        raise UsageError(f"port {port}; expected 0 (any that is free) to {LAST_PORT}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        mend = ("give an address of this machine as the host" if error.errno == errno.EADDRNOTAVAIL
                else "give another port, or 0 for any that is free")  # fmt: skip
        raise UsageError(f"cannot listen on {host}, port {port}: {error.strerror or error}; {mend}") from None
    # Head and body of an answer are two packets; the second would wait 40 ms for the first to be acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _url(host: str, listening: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
