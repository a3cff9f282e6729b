"""A program of its own, as one process has one Ray: a cluster of two hosts for actors; one is lost, and replaced.

Prints one JSON line: what a group came to on it, and what is left of the actors afterwards.
"""

import asyncio
import json

import ray
from ray.cluster_utils import Cluster

from byte_renderer import ByteRenderer
from ray_workers import warm_workers
from rollouts.players import Players, SecondTurnsWait, contents
from verbatim.config.cluster import ClusterConfig
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.ray.cluster import OBJECT_STORE_BYTES, connect
from verbatim.rollouts.ray.runner import ray_runner
from waiting import until, wait_until


async def play(cluster, nodes, add_node):
    players = Players(SecondTurnsWait())
    inputs = RunnerInputs(
        setups=players.remote(),
        sampler=players.sampler,
        renderer=ByteRenderer(),
        workers=2,
        cluster=ClusterConfig(address=cluster.address),
    )
    async with ray_runner(inputs) as pool:
        running = asyncio.create_task(players.group(pool, size=6).run())
        await until(lambda: len(players.sampler.requests) == 6)
        await asyncio.to_thread(cluster.remove_node, nodes[0])
        await until(lambda: pool.num_lost == 1)
        players.sampler.go_on.set()
        group = await running
        add_node()
        await until(lambda: len(pool.pids) == 2)
    here = await players.here(size=6)
    same = [contents(a) == contents(b) for a, b in zip(group.trajectories, here.trajectories, strict=True)]
    return {"same": same, "lost": pool.num_lost, "again": pool.num_rerun, "left": ray.is_initialized()}


def main():
    with warm_workers():
        lose_a_host()


def lose_a_host():
    quiet = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    try:

        def add_node():
            return cluster.add_node(num_cpus=1, **quiet)

        found = asyncio.run(play(cluster, [add_node(), add_node()], add_node))
        connect(ray, cluster.address)  # it is still there, and all of it is free, which its hosts report a little later
        wait_until(lambda: ray.available_resources().get("CPU") == 2.0)
        found["free"] = ray.available_resources().get("CPU")
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
