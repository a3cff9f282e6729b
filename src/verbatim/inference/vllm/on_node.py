"""Starts a vLLM server in an actor on a node of a cluster."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator

from verbatim.core.errors import SamplerFault
from verbatim.inference.backends import BackendInputs
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.servers import ATTEMPTS, base_model, is_taken_port
from verbatim.inference.vllm.settings import VllmSettings


@contextlib.asynccontextmanager
async def serve_on_node(
    inputs: BackendInputs, settings: VllmSettings, *, index: int, host: str, api_key: str
) -> AsyncIterator[str]:
    """Run one server while the block runs. Its subreaper ends it when this process ends, even if it is killed.

    Args:
        inputs: The run's inputs to its backend.
        settings: The table [inference.vllm].
        index: The replica's number.
        host: The address to listen on.
        api_key: Key that every request must carry.

    Yields:
        The server's root URL.

    Raises:
        SamplerFault: the server does not start.
    """
    assert inputs.logs is not None
    for attempt in itertools.count(1):
        process = make_process(
            settings.model_copy(update={"replicas": 1}),  # the cluster has chosen the devices that this process sees
            index,
            model=base_model(inputs.model),
            port=free_port(host),
            context_length=settings.max_model_len or inputs.context_length,
            logs=inputs.logs,
            host=host,
            api_key=api_key,
            adapter_rank=inputs.adapter_rank,
            return_routed_experts=inputs.return_routed_experts,
            return_kept_sets=inputs.return_kept_sets,
        )
        try:
            await process.start(settings.start_timeout)
            break
        except SamplerFault as fault:
            if attempt == ATTEMPTS or not is_taken_port(fault):
                raise
    try:
        yield process.url
    finally:
        await process.stop()
