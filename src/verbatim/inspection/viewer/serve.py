"""Serves runs on the loopback, as a context manager."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from verbatim.errors import UsageError
from verbatim.imports import refuse_without
from verbatim.viewer.assets import Asset

if TYPE_CHECKING:
    from verbatim.viewer.run_view import RunView

HOST = "127.0.0.1"
LAST_PORT = 65535
PACKAGES = ("aiohttp", "orjson", "pyarrow")


def refuse_without_packages() -> None:
    """Refuse to go on where the extra `viewer` is not installed.

    Raises:
        UsageError: a package is missing; says what to type.
    """
    for package in PACKAGES:
        refuse_without(package, extra="viewer", what="verbatim view")


@contextlib.asynccontextmanager
async def serve_runs(runs: Sequence[RunView], assets: Mapping[str, Asset], *, port: int = 0) -> AsyncIterator[str]:
    """Serve these runs while the block lasts; gives the page's address.

    Args:
        runs: Their threads run from here to the end of the block.
        assets: The page.
        port: 0 takes a free one.

    Raises:
        UsageError: the port is taken, or no port.
    """
    from aiohttp import web

    from verbatim.viewer.app import ViewerApp

    if not 0 <= port <= LAST_PORT:
        raise UsageError(f"--port {port}: expected 0 (any that is free) to {LAST_PORT}")
    runner = web.AppRunner(ViewerApp(runs, assets).make(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {HOST}, port {port}: {error.strerror or error}; give another --port, "
                "or 0 for any that is free"
            ) from None
        for run in runs:
            run.start()
            stack.callback(run.close)
        yield f"http://{HOST}:{runner.addresses[0][1]}"
