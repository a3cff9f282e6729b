"""Listens for the trainer's host, on a thread of the orchestrator's process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import UsageError

if TYPE_CHECKING:
    from verbatim.trainer.transport.mirror.app import MirrorApp

_POLL = 0.02
_SILENT = 3.0
"""Seconds without a request after which a trainer that was told to end is not waited for."""


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where the orchestrator's host listens."""

    host: str
    port: int
    """0 takes a free one."""
    key: str = field(repr=False)
    """Every request has to bring it."""
    certificate: Path | None = None
    """A PEM file, for https; None: http."""
    private_key: Path | None = None
    """Its key; None: it is in the same file."""

    def tls(self) -> ssl.SSLContext | None:
        """The certificate, loaded.

        Raises:
            UsageError: it cannot be read.
        """
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"--tls-cert {self.certificate}: {error}; expected PEM files of a certificate and its "
                "private key (--tls-key)"
            ) from None
        return context


class MirrorServer:
    """What listens."""

    def __init__(self, app: MirrorApp, url: str) -> None:
        self._app = app
        self.url = url

    def how_trainer_ended(self) -> str | None:
        """What the trainer said as it ended; None while it has not."""
        session = self._app.session
        if session is None or session.ended is None:
            return None
        return f"the trainer, {session.who}, has ended{f': {session.ended}' if session.ended else ''}"

    def wait_for_trainer(self, patience: float) -> None:
        """Wait until a trainer that was told to end has heard it and said so."""
        until = time.monotonic() + patience
        while (session := self._app.session) is not None and session.ended is None and session.exchange.is_attached:
            if time.monotonic() > until or time.monotonic() - session.heard > _SILENT:
                return
            time.sleep(_POLL)


@contextlib.contextmanager
def serve_mirror(app: MirrorApp, where: Listen) -> Iterator[MirrorServer]:
    """Answer requests while the block lasts.

    Raises:
        UsageError: the address is taken or not of this machine, or the certificate cannot be read.
    """
    from verbatim.inference.http.server import listen

    tls = where.tls()
    with listen(where.host, where.port) as listening:
        thread = _ServerThread(app, listening, tls)
        thread.start()
        host = f"[{where.host}]" if ":" in where.host else where.host
        try:
            yield MirrorServer(app, f"http{'s' if tls else ''}://{host}:{listening.getsockname()[1]}")
        finally:
            thread.stop()


class _ServerThread(threading.Thread):
    def __init__(self, app: MirrorApp, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(name="mirror-server", daemon=True)
        self._app, self._listening, self._tls = app, listening, tls
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        from verbatim.inference.http.connections import Server
        from verbatim.inference.http.doors import ConnectionTable
        from verbatim.trainer.transport.mirror.app import LIMITS

        most = min(LIMITS.max_connections, raise_descriptor_limit())
        server = Server(self._app, ConnectionTable(LIMITS, most), tls=self._tls)
        server.listen_on(self._listening)
        await self._stopping.wait()
        await server.stop()

    def stop(self) -> None:
        """End it, and wait for that."""
        self._app.stopping = True
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stopping.set)
        self.join()
