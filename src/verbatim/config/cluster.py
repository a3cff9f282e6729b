"""Defines [cluster]: the parts of a run on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verbatim.config.sections import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class NodeResources(Section):
    """Resources that one process reserves on its node."""

    cpus: NonNegativeFloat = 1.0
    """CPUs."""
    gpus: NonNegativeFloat | None = None
    """GPUs. Default: those that it computes on, if the cluster has any; half of one under colocate."""


class ClusterConfig(Section):
    """A Ray cluster, on whose nodes trainer ranks, sampler replicas and rollout workers are placed; the orchestrator is
    the command itself."""

    backend: Literal["ray"] = "ray"
    """The cluster's software."""
    address: str = "auto"
    """"auto": the cluster that this machine belongs to; an address such as "10.0.0.1:6379"; or "local": one that is
    started on this machine and ends with the run."""
    roles: tuple[Literal["trainer", "sampler"], ...] = ("trainer", "sampler")
    """The parts placed on the cluster; others run on this machine. Rollout workers are on the cluster if
    orchestrator.rollout.backend = "ray"."""
    replicas: PositiveInt = 1
    """Number of embedded engines; for vLLM, see inference.vllm.replicas."""
    trainer: NodeResources = NodeResources()
    """Resources of each trainer rank."""
    sampler: NodeResources = NodeResources()
    """Resources of each sampler replica."""
    worker: NodeResources = NodeResources(gpus=0.0)
    """Resources of each rollout worker."""
    transfer: Literal["object_store", "folder"] = "object_store"
    """How batches, weights and checkpoints reach other nodes: through Ray's object store, or through the run folder,
    which all nodes then have at the same path."""
    max_trainer_restarts: NonNegativeInt = 3
    """How often lost trainer ranks are replaced."""
    start_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds within which a process must start on the cluster."""
    host: str | None = None
    """This machine's address as seen from the nodes, where the sampler is served to rollout workers. Default: its
    address in the cluster."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that server; 0 picks a free one."""

    def places(self, role: Literal["trainer", "sampler"]) -> bool:
        """True if this part of the run is placed on the cluster."""
        return role in self.roles
