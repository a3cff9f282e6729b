"""Serves run folders on a thread, as `verbatim view` does, for a browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from verbatim.viewer.assets import load_assets
from verbatim.viewer.run_view import RunView
from verbatim.viewer.serve import serve_runs


@contextlib.contextmanager
def serving_page(*folders: Path) -> Iterator[str]:
    """The address of the page."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[str] = loop.create_future()
    ended = asyncio.Event()

    async def serve() -> None:
        try:
            async with serve_runs([RunView(folder) for folder in folders], load_assets()) as url:
                ready.set_result(url)
                await ended.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    async def address() -> str:
        return await ready

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(address(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()
