"""One server of the sampler, as a Ray actor on its node: an embedded engine behind HTTP, or a vLLM process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

from verbatim.core.disk import link_or_copy
from verbatim.core.errors import SamplerFault
from verbatim.core.imports import import_object
from verbatim.inference.backends import NODE_SERVERS
from verbatim.run.cluster.folders import ShippedFolder
from verbatim.run.cluster.rank_actor import ActorSetup, OnNode
from verbatim.run.rollouts import backend_inputs, inference_settings

_SERVED = "served"
"""The subfolder of weights that replicas load. Trainer ranks on the same node have the folders beside it."""


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
        logs = self.root / "logs" / "inference"
        logs.mkdir(parents=True, exist_ok=True)
        inputs = backend_inputs(self.config, model, policy_version=version, logs=logs)
        serve_on_node = import_object(NODE_SERVERS[self.config.inference.backend])
        settings = inference_settings(self.config)
        served = serve_on_node(inputs, settings, index=self._index, host=address, api_key=self._key)
        url: str = await self._open.enter_async_context(served)
        return url

    async def start(self, model: str, version: int) -> str:
        """Same as `serve`. Weights in the run's folder on this node are linked first, because other replicas may remove
        them during a long start."""
        path = Path(model)
        if not path.is_relative_to(self.root) or path.parent.name != "weights":
            return await self.serve(model, version)
        kept = self.root / f"replica_{self._index}.weights"
        await asyncio.to_thread(_link, path, kept)
        try:
            return await self.serve(str(kept), version)
        finally:
            await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)

    async def take(self, shipped: ShippedFolder) -> str:
        """Bring weights to this node, unless another replica has brought them; remove older versions. Return the
        folder."""
        return await asyncio.to_thread(self._take, shipped)

    def _take(self, shipped: ShippedFolder) -> str:
        path = Path(self.bring(shipped, _SERVED))
        if path.parent.name == "weights":
            self._remove_older(path)
        return str(path)

    def _remove_older(self, path: Path) -> None:
        """Remove the versions before the last two. `path` is the newest: weights/v000012."""
        assert self._place is not None
        newest = int(path.name[1:])
        with self._place.locked():
            for other in path.parent.glob("v[0-9]*"):
                if int(other.name[1:]) <= newest - 2:
                    shutil.rmtree(other, ignore_errors=True)
                    other.with_name(f".{other.name}.digest").unlink(missing_ok=True)

    async def close(self) -> None:
        """End the server, and let go of the run's folder on this node."""
        with contextlib.suppress(SamplerFault):
            await self._open.aclose()
        self.leave()


def _link(path: Path, kept: Path) -> None:
    """Hard-link the files of a folder, or copy them if links are not possible."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(path, kept, copy_function=link_or_copy)
