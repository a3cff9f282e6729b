"""Serves run folders on a thread, as `verbatim view` does, for a browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from chromium import Page

from verbatim.inspection.viewer.assets import load_assets
from verbatim.inspection.viewer.run_view import RunView
from verbatim.inspection.viewer.serve import serve_runs
from waiting import HANGS, wait_until


@contextlib.contextmanager
def serving_page(*folders: Path, indexed: bool = True) -> Iterator[str]:
    """The address of the page, once the runs are indexed, or at once."""
    views = [RunView(folder) for folder in folders]
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[str] = loop.create_future()
    ended = asyncio.Event()

    async def serve() -> None:
        try:
            async with serve_runs(views, load_assets()) as url:
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
        url = asyncio.run_coroutine_threadsafe(address(), loop).result(HANGS)
        wait_until(lambda: not indexed or all(view.about()["indexed"] == 1 for view in views))
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(HANGS)
        loop.close()


@contextlib.contextmanager
def serving_to(page: Page, *folders: Path) -> Iterator[str]:
    """The address; the page leaves it before the server ends: it asks for news again and again."""
    with serving_page(*folders) as url:
        try:
            yield url
        finally:
            page.open("about:blank")
