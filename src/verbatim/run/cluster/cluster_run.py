"""What one run has on a Ray cluster: reserved resources, trainer ranks, the sampler's servers, folders in the store."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.inference.pool.servers import ServerPool, open_pool
from verbatim.inference.sending import WeightSender
from verbatim.logs.monitors.live import LiveView
from verbatim.rollouts.workers.worker import WorkerContext
from verbatim.run.cluster.placement import Reserved, release, reserve
from verbatim.run.cluster.rank_actor import ActorSetup
from verbatim.run.cluster.ray_ranks import RayRanks
from verbatim.run.cluster.ray_trainer import RayTrainer
from verbatim.run.cluster.replicas import RayServers
from verbatim.run.cluster.shipments import Shipments
from verbatim.run.rollouts import backend_inputs, inference_settings
from verbatim.run.trainer_process import TrainerSide


class ClusterRun:
    """The parts of a run that are placed on the cluster.

    Args:
        config: A configuration with [cluster]. This process is connected to its cluster.
        folder: The run folder on this machine.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import ray

        assert config.cluster is not None
        self._ray, self._config, self._folder = ray, config, folder.resolve()
        self._shipments = Shipments(ray, self._folder)
        self._reserved: dict[str, Reserved] = {}
        self._setup = ActorSetup(
            context=WorkerContext.current(),
            config=dump_config(config),
            run=secrets.token_hex(8),
            shared=str(self._folder) if config.cluster.transfer == "folder" else None,
        )

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Reserve the resources while the block runs.

        Raises:
            UsageError: other jobs use them.
        """
        self._reserved = reserve(self._ray, self._config)
        try:
            yield
        finally:
            release(found.group for found in self._reserved.values())

    @contextlib.contextmanager
    def trainer(self, console: Console) -> Iterator[TrainerSide]:
        """The trainer's ranks, from their start to the end of the block."""
        ranks = RayRanks(
            self._ray,
            self._config,
            self._reserved["cluster.trainer"],
            self._setup,
            self._shipments,
            self._folder,
            console,
        )
        try:
            with LiveView(console).stage("starting the trainer on the cluster"):
                ready = ranks.start_first()
            link = RayTrainer(ranks, ready, keep=self._config.orchestrator.max_async_level + 2)
            yield TrainerSide(ready=ready, link=link, progress=lambda doing: None, wants_to_stop=lambda: False)
        finally:
            ranks.end(in_order=False)

    async def sampler(self, weights: str, version: int, sender: WeightSender | None) -> ServerPool:
        """A pool of the sampler's servers, each started with these weights and checked.

        Raises:
            UsageError: the run cannot sample from a server.
            SamplerFault: a server does not start.
        """
        inputs = backend_inputs(self._config, weights, policy_version=version, sender=sender)
        servers = RayServers(
            self._ray, self._config, inputs, self._reserved["cluster.sampler"], self._setup, self._shipments
        )
        settings: Any = inference_settings(self._config)
        return await open_pool(servers, settings)
