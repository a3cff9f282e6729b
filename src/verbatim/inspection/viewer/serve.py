"""Serves runs on the loopback interface while a `with` block runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.inference.http.server import listen
from verbatim.inspection.viewer.assets import Asset

if TYPE_CHECKING:
    from verbatim.inspection.viewer.run_view import RunView

HOST = "127.0.0.1"
PACKAGES = ("starlette", "uvicorn", "orjson", "pyarrow")
_GRACE = 1.0
"""Maximum number of seconds to finish writing answers when the viewer ends."""
_CONNECTIONS = 1024


def refuse_without_packages() -> None:
    """Raise an error if the extra `viewer` is not installed.

    Raises:
        UsageError: packages are missing; the message says how to install them.
    """
    refuse_without(*PACKAGES, extra="viewer", what="verbatim view")


@contextlib.asynccontextmanager
async def serve_runs(runs: Sequence[RunView], assets: Mapping[str, Asset], *, port: int = 0) -> AsyncIterator[str]:
    """Serve the runs while the block runs, and yield the page's address.

    Args:
        runs: The runs. Their threads run while the block runs.
        assets: The page.
        port: The port to listen on; 0 selects a free port.

    Raises:
        UsageError: the port is in use or invalid.
    """
    from verbatim.inference.http.connections import Server
    from verbatim.inference.http.doors import ConnectionTable
    from verbatim.inference.http.limits import ConnectionLimits
    from verbatim.inspection.viewer.app import ViewerApp

    app = ViewerApp(runs, assets)
    limits = ConnectionLimits(max_connections=_CONNECTIONS)
    server = Server(app, ConnectionTable(limits, min(limits.max_connections, raise_descriptor_limit())))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(app.close)
        try:
            listening = stack.enter_context(listen(HOST, port))
        except UsageError as error:
            raise UsageError(str(error).replace("another port", "another --port")) from None
        server.listen_on(listening)
        stack.push_async_callback(server.stop, _GRACE)
        for run in runs:
            run.start()
            stack.callback(run.close)
        yield f"http://{HOST}:{listening.getsockname()[1]}"
