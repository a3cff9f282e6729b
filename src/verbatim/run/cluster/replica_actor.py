"""One server of the sampler, as a Ray actor on its node: an embedded engine behind HTTP, or a vLLM process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from verbatim.core.errors import SamplerFault
from verbatim.inference.backends import BackendInputs
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.run.cluster.folders import ShippedFolder
from verbatim.run.cluster.rank_actor import ActorSetup, OnNode
from verbatim.run.rollouts import backend_inputs, inference_settings


class ReplicaActor(OnNode):
    """A server. Its process ends with this actor: an engine lives in the actor's process, and vLLM's subreaper ends
    vLLM when that process ends, even if it is killed.

    Args:
        setup: What each actor of the run gets.
        index: The replica's number.
        key: The key that requests must carry.
    """

    def __init__(self, setup: ActorSetup, index: int, key: str) -> None:
        super().__init__(setup)
        self._index, self._key = index, key
        self._open = contextlib.AsyncExitStack()

    async def serve(self, model: str, version: int) -> str:
        """Start the server with these weights; return its URL.

        Raises:
            SamplerFault: the server does not start.
            UsageError: the engine refuses the model.
        """
        _, address, _ = self.where()
        inputs = backend_inputs(self.config, model, policy_version=version, logs=self._logs())
        settings = inference_settings(self.config)
        if isinstance(settings, TorchSettings):
            return await self._serve_engine(inputs, settings, address)
        return await self._serve_vllm(inputs, settings, address)

    def _logs(self) -> Path:
        logs = self.root / "logs" / "inference"
        logs.mkdir(parents=True, exist_ok=True)
        return logs

    async def _serve_engine(self, inputs: BackendInputs, settings: TorchSettings, address: str) -> str:
        from verbatim.inference.embedded.backend import torch_backend
        from verbatim.inference.http.server import serve_sampler

        sampler = await torch_backend(inputs, settings)
        self._open.push_async_callback(sampler.close)
        served = serve_sampler(sampler, host=address, api_key=self._key)
        return (await self._open.enter_async_context(served)).url

    async def _serve_vllm(self, inputs: BackendInputs, settings: Any, address: str) -> str:
        from verbatim.inference.vllm.process import free_port, make_process
        from verbatim.inference.vllm.servers import base_model

        process = make_process(
            settings.model_copy(update={"replicas": 1}),  # Ray has chosen the devices that this process sees
            self._index,
            model=base_model(inputs.model),
            port=free_port(address),
            context_length=settings.max_model_len or inputs.context_length,
            logs=self._logs(),
            host=address,
            api_key=self._key,
            adapter_rank=inputs.adapter_rank,
            return_routed_experts=inputs.return_routed_experts,
            return_kept_sets=inputs.return_kept_sets,
        )
        self._open.push_async_callback(process.stop)
        await process.start(settings.start_timeout)
        return process.url

    async def take(self, shipped: ShippedFolder) -> str:
        """Bring weights to this node, unless another replica has brought them; remove older versions. Return the
        folder."""
        return await asyncio.to_thread(self._take, shipped)

    def _take(self, shipped: ShippedFolder) -> str:
        path = Path(self.bring(shipped))
        if path.parent.name == "weights":
            self.remove_older(path)
        return str(path)

    async def close(self) -> None:
        """End the server, and let go of the run's folder on this node."""
        with contextlib.suppress(SamplerFault):
            await self._open.aclose()
        self.leave()
