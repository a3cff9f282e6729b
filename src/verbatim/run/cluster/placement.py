"""Places a run on the nodes of a Ray cluster: what each part needs, whether the cluster holds it, and its placement
groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verbatim.config.cluster import NodeResources
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.catalog import folder_of
from verbatim.run.rollouts import inference_settings

Resources = Mapping[str, float]
"""Ray's names ("CPU", "GPU") and amounts."""

BYTES_PER_TOKEN = 25
"""Bytes of a batch per token, for samples built from arrays; samples built from spans take at most 8."""
_VERSIONS = 2
"""Versions of the weights that a node may hold at a time: the one that samplers load, and the next."""
_PATIENCE = 60.0
"""Seconds for Ray to reserve resources that are free."""


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """Equal processes of a run."""

    name: str
    """For messages: "trainer rank"."""
    key: str
    """The key of their resources: "cluster.trainer"."""
    count: int
    """Number of processes."""
    each: Resources
    """What each of them reserves; nothing for those that share another part's reservation."""
    strategy: str
    """Ray's strategy for a placement group: "PACK" or "SPREAD"."""

    def __str__(self) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.each.items() if amount)
        how = "packed" if self.strategy == "PACK" else "spread"
        return f"{self.count} {self.name}{'s' * (self.count > 1)}, {each or 'no resources'} each, {how}"


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node of the cluster."""

    address: str
    resources: Resources
    """All of its resources, in use or not."""
    object_store: int
    """Size of its object store in bytes."""


def parts_of(config: RunConfig, *, has_gpus: bool) -> list[RunPart]:
    """The parts of a run that are placed on the cluster.

    Args:
        config: A configuration with [cluster].
        has_gpus: True if a node has GPUs.
    """
    assert config.cluster is not None
    cluster, settings, parts = config.cluster, inference_settings(config), []
    shares = settings.shares_device
    if cluster.places("trainer"):
        gpus = (0.5 if shares else 1.0) if has_gpus and config.trainer.device != "cpu" else 0.0
        each = _reserved(cluster.trainer, gpus)
        parts.append(
            RunPart(
                name="trainer rank",
                key="cluster.trainer",
                count=config.trainer.parallel.processes,
                each=each,
                strategy="PACK",
            )
        )
    if cluster.places("sampler"):
        computes = has_gpus and getattr(settings, "device", "auto") != "cpu"
        # An engine has one device. Its plan would need its dtype, which the nodes may still have to choose.
        devices_each = 1 if isinstance(settings, TorchSettings) else settings.planned().devices_each
        gpus = (0.5 if shares else float(devices_each)) if computes else 0.0
        parts.append(
            RunPart(
                name="sampler replica",
                key="cluster.sampler",
                count=num_replicas(config),
                each=_reserved(cluster.sampler, gpus),
                strategy="SPREAD",
            )
        )
    if config.orchestrator.rollout.backend == "ray":
        workers = config.orchestrator.rollout.workers
        parts.append(
            RunPart(
                name="rollout worker",
                key="cluster.worker",
                count=workers,
                each=_reserved(cluster.worker, 0.0),
                strategy="SPREAD",
            )
        )
    return parts


def num_replicas(config: RunConfig) -> int:
    """Number of the sampler's replicas on the cluster."""
    assert config.cluster is not None
    settings = inference_settings(config)
    return config.cluster.replicas if isinstance(settings, TorchSettings) else settings.planned().count


def _reserved(own: NodeResources, gpus: float) -> dict[str, float]:
    return {"CPU": own.cpus, "GPU": gpus if own.gpus is None else own.gpus}


def nodes_of(ray: Any) -> list[ClusterNode]:
    """The nodes that are alive."""
    return [
        ClusterNode(
            address=node["NodeManagerAddress"],
            resources={name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")},
            object_store=int(node["Resources"].get("object_store_memory", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_cluster(ray: Any, config: RunConfig) -> list[str]:
    """Check that the cluster holds the run; return the placement, one line each, for people.

    Raises:
        UsageError: the cluster has too few resources, or an object store is too small; the message says what it has.
    """
    assert config.cluster is not None
    nodes = nodes_of(ray)
    parts = parts_of(config, has_gpus=any(node.resources["GPU"] for node in nodes))
    _refuse_unequal(config)
    totals = {name: sum(node.resources[name] for node in nodes) for name in ("CPU", "GPU")}
    has = f"{len(nodes)} node{'s' * (len(nodes) != 1)} with {totals['CPU']:g} CPUs and {totals['GPU']:g} GPUs together"
    free = [dict(node.resources) for node in nodes]
    for part in _bundles(config, parts):
        for number in range(part.count):
            if (fits := _first_with_room(free, part, number)) is None:
                largest = max(nodes, key=lambda node: (node.resources["GPU"], node.resources["CPU"]))
                raise UsageError(
                    f"the cluster cannot hold {part}: there is room for {number}. It has {has}; the largest node has "
                    f"{largest.resources['CPU']:g} CPUs and {largest.resources['GPU']:g} GPUs. Add nodes, lower "
                    f"{part.key}.cpus or .gpus, or start fewer"
                )
            for name, amount in part.each.items():
                free[fits][name] -= amount
    lines = [f"cluster     {has}", *(f"cluster     {part}" for part in parts)]
    ships = config.cluster.roles and config.cluster.transfer == "object_store"
    if ships and (needed := store_bytes(config)) is not None:
        smallest = min(nodes, key=lambda node: node.object_store)
        if smallest.object_store < needed:
            raise UsageError(
                f"the object store of node {smallest.address} has {smallest.object_store / 1e9:.3g} GB, but "
                f"{_VERSIONS} versions of the weights and the batches in flight need {needed / 1e9:.3g} GB: start the "
                f"node with `ray start --object-store-memory {needed}`, or let all nodes share the run folder: "
                'cluster.transfer = "folder"'
            )
        lines.append(
            f"cluster     object store: up to {needed / 1e9:.3g} GB per node, of at least "
            f"{smallest.object_store / 1e9:.3g} GB"
        )
    return lines


def _bundles(config: RunConfig, parts: Sequence[RunPart]) -> list[RunPart]:
    """The parts by what is reserved, those that need most first, so that small ones do not take the room of large ones.
    A trainer rank and a replica that take turns share one bundle, because Ray assigns a whole GPU to one bundle."""
    bundles = [*parts]
    are_both_placed = {"cluster.trainer", "cluster.sampler"} <= {part.key for part in parts}
    if are_both_placed and inference_settings(config).shares_device:
        trainer, sampler, *rest = parts
        both = {name: trainer.each[name] + sampler.each[name] for name in ("CPU", "GPU")}
        bundles = [replace(trainer, name="trainer rank with its replica", each=both), *rest]
    return sorted(bundles, key=lambda part: (part.each["GPU"], part.each["CPU"]), reverse=True)


def _first_with_room(free: Sequence[Mapping[str, float]], part: RunPart, number: int) -> int | None:
    """The node for one process. Packed processes take the first node with room; spread ones begin the search at
    another node each."""
    start = number % len(free) if part.strategy == "SPREAD" else 0
    order: list[int] = [*range(start, len(free)), *range(start)]
    for index in order:
        if all(free[index].get(name, 0.0) >= amount for name, amount in part.each.items()):
            return index
    return None


def _refuse_unequal(config: RunConfig) -> None:
    """Refuse settings that contradict a cluster.

    Raises:
        UsageError: the message names the key, and what to type.
    """
    settings = inference_settings(config)
    assert config.cluster is not None
    if not config.cluster.places("sampler"):
        return
    for key in ("urls", "devices"):
        if getattr(settings, key, ()):
            raise UsageError(
                f"inference.{config.inference.backend}.{key} names servers or devices of your own, but [cluster] "
                f'places the sampler\'s replicas; leave out {key}, or set cluster.roles = ["trainer"]'
            )
    if config.inference.backend not in ("torch", "vllm"):
        raise UsageError(
            f'inference.backend = {config.inference.backend!r}: [cluster] places replicas of "torch" and "vllm"; '
            'set cluster.roles = ["trainer"] to keep the sampler on this machine'
        )
    if settings.shares_device and (not config.cluster.places("trainer") or num_replicas(config) > 1):
        raise UsageError(
            f"inference.{config.inference.backend}.colocate: one replica takes turns with one trainer rank, both on "
            "the cluster; leave out colocate, or use one replica and the roles trainer and sampler"
        )


def store_bytes(config: RunConfig) -> int | None:
    """Bytes that a node's object store needs: two versions of the weights in float32, and the batches in flight. None
    if the size of the weights is not known before the run."""
    orchestrator = config.orchestrator
    batches = (orchestrator.max_async_level + 1) * orchestrator.batch_size * orchestrator.seq_len * BYTES_PER_TOKEN
    weights = None if config.trainer.lora is not None else _weight_bytes(config)
    if config.trainer.lora is None and weights is None:
        return None
    return _VERSIONS * (weights or 0) + batches


def _weight_bytes(config: RunConfig) -> int | None:
    """Size of one published version in bytes (float32), from the headers of the model's files."""
    if config.model.name is None:
        return None  # [model.build] makes models of megabytes
    folder = Path(folder_of(config.model.name))
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return 4 * sum(map(_num_elements, files)) if files else None


def _num_elements(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  (not a mapping)
    return sum(int(math.prod(shape)) for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Reserved resources, one bundle for each process of a part."""

    group: Any
    """Ray's placement group."""
    each: Resources
    """What a process takes of its bundle."""

    def options(self, index: int) -> dict[str, Any]:
        """The options of the actor of process `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self.each["CPU"],
            "num_gpus": self.each["GPU"],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
        }


def reserve(ray: Any, config: RunConfig) -> dict[str, Reserved]:
    """Reserve what trainer and sampler need, by the key of the part.

    Raises:
        UsageError: other jobs use the resources.
    """
    has_gpus = any(node.resources["GPU"] for node in nodes_of(ray))
    parts = [part for part in parts_of(config, has_gpus=has_gpus) if part.name != "rollout worker"]
    groups: dict[str, Any] = {}
    try:
        for part in _bundles(config, parts):
            groups[part.key] = _reserve(ray, part, [part.each] * part.count)
    except UsageError:
        release(groups.values())
        raise
    shared = groups.get("cluster.trainer")
    return {part.key: Reserved(group=groups.get(part.key, shared), each=part.each) for part in parts}


def release(groups: Iterable[Any]) -> None:
    """Remove placement groups, each of them once."""
    from ray.util.placement_group import remove_placement_group

    for group in {id(group): group for group in groups}.values():
        remove_placement_group(group)


def _reserve(ray: Any, part: RunPart, bundles: Sequence[Resources]) -> Any:
    from ray.util.placement_group import placement_group, remove_placement_group

    # Ray refuses an empty bundle.
    wanted = [{name: amount for name, amount in each.items() if amount} or {"CPU": 0.001} for each in bundles]
    group = placement_group(wanted, strategy=part.strategy)
    if not group.wait(_PATIENCE):
        remove_placement_group(group)
        free = ray.available_resources()
        raise UsageError(
            f"the cluster has no room for {part}: {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs "
            f"are free, perhaps not on one node. Wait for other jobs, or lower {part.key}.cpus"
        )
    return group
