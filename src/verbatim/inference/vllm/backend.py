"""The inference backend for vLLM: starts or finds the servers of [inference.vllm]. Importing this module loads nothing
heavy."""

from __future__ import annotations

from verbatim.inference.backends import BackendInputs
from verbatim.inference.sampler import Sampler
from verbatim.inference.vllm.settings import VllmSettings


async def vllm_backend(inputs: BackendInputs, settings: VllmSettings) -> Sampler:
    """The pool of servers with the weights in `inputs.model`. Each server has been checked.

    Raises:
        UsageError: a server cannot sample exactly or cannot load weights; the message says what to type.
        SamplerFault: a server does not start or answer.
    """
    # Imported here, so that importing this module stays light.
    from verbatim.inference.pool.servers import open_pool
    from verbatim.inference.vllm.servers import vllm_servers

    return await open_pool(vllm_servers(inputs, settings), settings)
