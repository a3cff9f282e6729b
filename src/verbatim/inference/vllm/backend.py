"""Starts or finds vLLM servers from [inference.vllm], as an inference backend. Importing this loads nothing heavy."""

from __future__ import annotations

from verbatim.inference.backends import BackendInputs
from verbatim.inference.sampler import Sampler
from verbatim.inference.vllm.settings import VllmSettings


async def vllm_backend(inputs: BackendInputs, settings: VllmSettings) -> Sampler:
    """The pool of servers, each checked, with the weights in `inputs.model`.

    Raises:
        UsageError: a server that cannot sample exactly, or cannot take weights; says what to type.
        SamplerFault: a server that does not start or answer.
    """
    from verbatim.inference.pool.servers import open_pool
    from verbatim.inference.vllm.servers import vllm_servers

    return await open_pool(vllm_servers(inputs, settings), settings)
