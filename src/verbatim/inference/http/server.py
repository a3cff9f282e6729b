"""Serves a sampler over HTTP, as a context manager: token ids in, token ids out.

It runs in the caller's event loop, beside other users of the sampler there.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import UsageError
from verbatim.inference.chat.protocol import Options
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.sampler import Sampler

if TYPE_CHECKING:
    from verbatim.models.renderers.renderer import Renderer

LAST_PORT = 65535
"""Largest TCP port."""
_BACKLOG = 2048
"""Connections that may wait to be accepted: all episodes of a batch may start at once."""


@dataclass(frozen=True, kw_only=True)
class SamplerServer:
    """A running server."""

    url: str
    """Its address, such as "http://127.0.0.1:40123"; OpenAI's clients need "/v1" appended."""
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
    uploads: Path | None = None,
    allow_hosts: Collection[str] = (),
    chat_processes: int = 0,
    options: Options | None = None,
) -> AsyncIterator[SamplerServer]:
    """Serve a sampler while the block lasts; then requests in flight are cancelled and answered with 503. Raises this
    process's limit of open files as far as the system allows it.

    Args:
        sampler: The sampler to serve; it stays open afterwards.
        host: Address to listen on: loopback by default. Every client that reaches it may sample.
        port: 0 takes a free one.
        renderer: The model's chat format; it adds the chat protocols, and its stop ids end completions. No other code
            may use it meanwhile; its `decode` is called on the sampler's thread, to find stop strings.
        model: The model's name in requests.
        api_key: Required as a bearer token; None requires none.
        seed: Seed of the seeds of requests that bring none; None draws different ones each time.
        limits: Of one client; None takes the defaults.
        weights_folder: Weights are accepted from folders in this one; None accepts any folder, with the key.
        uploads: Weights are accepted over HTTP into this folder, with the key; None accepts none.
        allow_hosts: Host names that requests may use, beside its address, `host` and "localhost"; "*" allows any.
            Checked without a key only.
        chat_processes: Processes that render conversations; 0 renders on a thread, where one long or hostile
            conversation slows down everything else in this process.
        options: Fields of chat requests that are let pass although they cannot be honoured; None lets none pass.

    Raises:
        UsageError: the extra `serve` is not installed, uploads without a key, the address is taken or not of this
            machine, or the renderer cannot be created in other processes.
    """
    try:
        from verbatim.inference.http.app import SamplerApp
        from verbatim.inference.http.connections import Server
        from verbatim.inference.http.doors import ConnectionTable
        from verbatim.inference.http.render_pool import ProcessRenderPool, RenderPool, ThreadRenderPool
    except ImportError as error:
        raise UsageError(f"serving a sampler needs {error.name}: pip install 'verbatim-rl[serve]'") from None
    _check_uploads(uploads, api_key)
    limits = limits or ServerLimits()
    table = ConnectionTable(limits, min(limits.max_connections, raise_descriptor_limit()))
    async with contextlib.AsyncExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        render_pool: RenderPool | None = None
        if renderer is not None:
            render_pool = (
                ProcessRenderPool(renderer, chat_processes, limits) if chat_processes else ThreadRenderPool(renderer)
            )
            stack.push_async_callback(render_pool.close)
            await render_pool.start()
        app = SamplerApp(
            sampler,
            render_pool=render_pool,
            renderer=renderer,
            model=model,
            api_key=api_key,
            seed=seed,
            limits=limits,
            weights_folder=weights_folder,
            uploads=uploads,
            hosts={"localhost", host, *allow_hosts},
            options=options or Options(),
        )
        server = Server(app, table)
        stack.push_async_callback(server.stop)
        stack.callback(app.stop)
        server.listen_on(listening)
        address = f"[{host}]" if ":" in host else host
        yield SamplerServer(url=f"http://{address}:{listening.getsockname()[1]}", model=model)


def _check_uploads(uploads: Path | None, api_key: str | None) -> None:
    if uploads is not None and api_key is None:
        raise UsageError("uploads of weights need an api key: whoever reaches this server could load other weights")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    if not 0 <= port <= LAST_PORT:
        raise UsageError(f"port {port}; expected 0 (any that is free) to {LAST_PORT}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        mend = (
            "give an address of this machine as the host"
            if error.errno == errno.EADDRNOTAVAIL
            else "give another port, or 0 for any that is free"
        )
        raise UsageError(f"cannot listen on {host}, port {port}: {error.strerror or error}; {mend}") from None
    # Head and body of an answer are two packets; the second would wait 40 ms for the first to be acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def as_others_reach(url: str, host: str) -> str:
    """The URL under which other hosts most probably reach a server.

    Args:
        url: Its URL on this machine.
        host: What it listens on: 0.0.0.0 and :: are all addresses of this machine, of which one has to be named.
    """
    if host not in ("0.0.0.0", "::"):
        return url
    return urlsplit(url)._replace(netloc=f"{own_address()}:{urlsplit(url).port}").geturl()


def own_address() -> str:
    """The address of this machine that others most probably reach; its name where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # sends nothing: an address for documentation (RFC 5737)
            return str(asking.getsockname()[0])
        except OSError:
            return socket.gethostname()
