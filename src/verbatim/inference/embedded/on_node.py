"""Serves an embedded engine in an actor on a node of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from verbatim.inference.backends import BackendInputs
from verbatim.inference.embedded.backend import torch_backend
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http.server import serve_sampler


@contextlib.asynccontextmanager
async def serve_on_node(
    inputs: BackendInputs, settings: TorchSettings, *, index: int, host: str, api_key: str
) -> AsyncIterator[str]:
    """Serve one engine while the block runs. The arguments and the result are those of vLLM's `serve_on_node`.

    Raises:
        UsageError: the engine refuses the model, or the server cannot listen.
    """
    sampler = await torch_backend(inputs, settings)
    try:
        async with serve_sampler(sampler, host=host, api_key=api_key) as server:
            yield server.url
    finally:
        await sampler.close()
