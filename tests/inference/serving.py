"""Servers of the embedded engine on threads of this process, which can be stopped and started again on their port."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from ports import held_port, number_of
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http.server import serve_sampler
from waiting import HANGS


class TorchServer:
    """A server of `model`, from `start` to `stop`, as often as they are called.

    Args:
        model: The folder of the weights that it starts with.
        context_length: Most tokens of a sequence.
        serving: Arguments of `serve_sampler`.
    """

    def __init__(
        self, model: Path, *, context_length: int, on_weight_update: Any = "recompute", **serving: Any
    ) -> None:
        self._model, self._context_length, self._on_weight_update = model, context_length, on_weight_update
        self._serving = serving
        self._held = held_port()  # between a stop and the next start too
        self._thread: threading.Thread | None = None
        self.url = ""
        self.engine: TorchSampler | None = None

    def start(self) -> TorchServer:
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(HANGS)
        return self

    def stop(self) -> None:
        """As a server that is lost: what is in flight fails, and nothing listens on its port."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(HANGS)
            assert not self._thread.is_alive()
            self._thread = None

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self.engine = TorchSampler(
            self._model,
            config=TorchSettings(device="cpu", max_batch_size=8),
            context_length=self._context_length,
            num_threads=1,
            on_weight_update=self._on_weight_update,
        )
        try:
            async with serve_sampler(self.engine, port=number_of(self._held), **self._serving) as server:
                self.url = server.url
                self._up.set()
                await self._end.wait()
        finally:
            await self.engine.close()
