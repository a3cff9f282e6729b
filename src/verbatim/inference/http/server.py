"""A context manager that serves a sampler over HTTP, with token ids and with the chat protocols.

The server runs in the caller's event loop; other code there may use the sampler at the same time.
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
"""Largest TCP port number."""
_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted. The number is large, because all episodes of a batch may
connect at the same time."""


@dataclass(frozen=True, kw_only=True)
class SamplerServer:
    """A running server."""

    url: str
    """Address of the server, such as "http://127.0.0.1:40123". Append "/v1" for OpenAI's clients."""
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
    """Serve a sampler until the end of the block; requests still in flight are then cancelled and answered with 503.
    Increases the process's limit of open files as far as the system allows.

    Args:
        sampler: The sampler to serve; it stays open afterwards.
        host: Address to listen on; loopback by default. Without a key, any client that can connect may sample.
        port: TCP port; 0 for any free port.
        renderer: The model's chat format. It enables the chat protocols, and its stop ids end completions. No other
            code may use the renderer meanwhile. Its `decode` is called on the sampler's thread to find stop strings.
        model: The model's name in requests.
        api_key: Key that requests must carry as a bearer token; None if no key is required.
        seed: Seeds the generator that draws a seed for each request without a seed. None: the drawn seeds differ from
            run to run.
        limits: Limits of the server; None for the defaults.
        weights_folder: Weights are accepted only from subfolders of this folder. If None, they are accepted from any
            folder, but only with the key.
        uploads: Folder for weights that are uploaded with the key; None to refuse uploads.
        allow_hosts: Host names that requests may use in addition to IP addresses, `host` and "localhost"; "*" allows
            any. Checked only if there is no key.
        chat_processes: Number of processes that render conversations. With 0, rendering runs on a thread, where one
            long or hostile conversation slows down everything else in this process.
        options: Which unenforceable fields of chat requests are accepted, and the maximum number of replies per
            response; None for the defaults.

    Raises:
        UsageError: the extra `serve` is not installed, `uploads` is set without a key, the address is in use or does
            not belong to this machine, or the renderer cannot be created in other processes.
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
        # The stack unwinds in reverse: `app.stop` ends the requests first, then the server closes, and the render pool
        # last.
        stack.push_async_callback(server.stop)
        stack.callback(app.stop)
        server.listen_on(listening)
        address = f"[{host}]" if ":" in host else host
        yield SamplerServer(url=f"http://{address}:{listening.getsockname()[1]}", model=model)


def _check_uploads(uploads: Path | None, api_key: str | None) -> None:
    if uploads is not None and api_key is None:
        raise UsageError("uploads need an api key: without one, any client that can connect could replace the weights")


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UsageError: the address is in use, or does not belong to this machine.
    """
    if not 0 <= port <= LAST_PORT:
        raise UsageError(f"port {port}; expected 0 (any that is free) to {LAST_PORT}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        hint = (
            "give an address of this machine as the host"
            if error.errno == errno.EADDRNOTAVAIL
            else "give another port, or 0 for any that is free"
        )
        raise UsageError(f"cannot listen on {host}, port {port}: {error.strerror or error}; {hint}") from None
    # With Nagle's algorithm, the second packet of a response waits for the ACK of the first, which may take 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def as_others_reach(url: str, host: str) -> str:
    """The URL at which other hosts can most likely reach a server.

    Args:
        url: The server's URL on this machine.
        host: The address that the server listens on. For 0.0.0.0 and ::, which mean all addresses, one of this
            machine's addresses is chosen.
    """
    if host not in ("0.0.0.0", "::"):
        return url
    return urlsplit(url)._replace(netloc=f"{own_address()}:{urlsplit(url).port}").geturl()


def own_address() -> str:
    """The address at which other hosts can most likely reach this machine; its host name if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a UDP socket sends nothing, but selects the outgoing interface. RFC 5737 reserves the address.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
