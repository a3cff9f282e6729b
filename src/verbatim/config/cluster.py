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
    """GPUs. Default: those that the process computes on, if the cluster has GPUs; a trainer rank and a colocated
    sampler have half of one each."""


class ClusterConfig(Section):
    """Run on a Ray cluster: trainer ranks, sampler replicas and rollout workers are placed on its nodes; the
    orchestrator is the command itself. Without this table, a run uses one machine."""

    backend: Literal["ray"] = "ray"
    """The cluster's software."""
    address: str = "auto"
    """The cluster: "auto" for the one that this machine belongs to, an address such as "10.0.0.1:6379", or "local" to
    start one on this machine, which ends with the run."""
    roles: tuple[Literal["trainer", "sampler"], ...] = ("trainer", "sampler")
    """The parts placed on the cluster; a part that is not listed runs on this machine. Rollout workers are on the
    cluster if orchestrator.rollout.backend = "ray"."""
    replicas: PositiveInt = 1
    """Number of embedded engines (inference.backend = "torch"). For vLLM it is inference.vllm.replicas."""
    trainer: NodeResources = NodeResources()
    """Resources of each trainer rank. Ranks are packed onto as few nodes as possible."""
    sampler: NodeResources = NodeResources()
    """Resources of each replica. Replicas are spread over the nodes; one replica has all of its devices on one node."""
    worker: NodeResources = NodeResources(gpus=0.0)
    """Resources of each rollout worker. Workers are spread over the nodes."""
    transfer: Literal["object_store", "folder"] = "object_store"
    """How batches, weights and checkpoints reach other nodes: through Ray's object store, or through the run folder if
    all nodes have it at the same path. With inference.vllm.weight_transfer = "nccl" or "gloo", the trainer sends the
    weights themselves."""
    max_trainer_restarts: NonNegativeInt = 3
    """How often a run may lose trainer ranks. All ranks then restart from the newest checkpoint and train again on the
    batches since."""
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
