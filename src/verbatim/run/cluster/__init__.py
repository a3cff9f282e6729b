"""Runs trainer and sampler on the nodes of a Ray cluster.

```
cluster_run.py    what one run has on the cluster; read this first
placement.py      resources and placement groups, shown and checked before anything starts
node_machine.py   what dtype = "auto" measures on the nodes
folders.py        folders through the object store
shipments.py      which folders are in the store
node_folder.py    the folder of a run on one node
rank_actor.py     one trainer rank                      (on a node)
ray_ranks.py      the actors of all ranks               (in the orchestrator's process)
ray_trainer.py    the link to them, and restarts        (in the orchestrator's process)
replica_actor.py  one server of the sampler             (on a node)
replicas.py       the servers of the sampler's pool     (in the orchestrator's process)
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.rollouts.ray.cluster import ray_running
from verbatim.run.machine import Machine


@contextlib.contextmanager
def connected(config: RunConfig) -> Iterator[list[str]]:
    """Stay connected to the cluster of a configuration while the block runs. Yields lines that describe the placement;
    none without [cluster].

    Raises:
        UsageError: there is no cluster, or it cannot hold the run.
    """
    if config.cluster is None:
        yield []
        return
    with _ray(config) as ray:
        from verbatim.run.cluster.placement import check_cluster

        yield check_cluster(ray, config)


def look_at_cluster(config: RunConfig) -> list[str]:
    """Lines that describe the placement, or one line that says why the cluster cannot be reached; none without
    [cluster].

    Raises:
        UsageError: the cluster cannot hold the run.
    """
    if config.cluster is None:
        return []
    from verbatim.run.cluster.placement import check_cluster

    with contextlib.ExitStack() as stack:
        try:
            ray = stack.enter_context(_ray(config))
        except UsageError as error:
            return [f"cluster     not checked: {' '.join(str(error).split())}"]
        return check_cluster(ray, config)


def machine_of(config: RunConfig) -> Machine | None:
    """Answers what `dtype = "auto"` asks of the nodes, while this process is connected to the cluster; None without
    [cluster]."""
    if config.cluster is None:
        return None
    import ray

    from verbatim.run.cluster.node_machine import NodeMachine

    return NodeMachine(ray, config)


def _ray(config: RunConfig) -> contextlib.AbstractContextManager[Any]:
    """The connection to the configured cluster."""
    assert config.cluster is not None
    address = None if config.cluster.address == "local" else config.cluster.address
    return ray_running(address, only_episodes=not config.cluster.roles)
