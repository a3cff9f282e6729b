"""What the tests of two hosts share."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

KEY, SESSION = "a-key-of-16-bytes", "00112233445566ff"


Pump = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Network(abc.ABC):
    """What lies between two hosts: a port that connects to another one."""

    def __init__(self, port: int) -> None:
        self._to, self.url, self.connections = port, "", 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @abc.abstractmethod
    def pump(self) -> Pump:
        """Passes bytes on in one direction of the next connection, which breaks as soon as it returns."""

    async def _connect(self, here_in: asyncio.StreamReader, here_out: asyncio.StreamWriter) -> None:
        pump = self.pump()
        self.connections += 1
        there_in, there_out = await asyncio.open_connection("127.0.0.1", self._to)
        pumps = [asyncio.create_task(pump(*ends)) for ends in ((here_in, there_out), (there_in, here_out))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in pumps:
            each.cancel()
        for writer in (here_out, there_out):
            writer.transport.abort()


def folder_with(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path
