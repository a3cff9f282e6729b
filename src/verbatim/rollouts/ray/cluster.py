"""Connects to a Ray cluster or starts one, without Ray's output."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without

OBJECT_STORE_BYTES = 80 * 2**20
"""Size in bytes of the object store if Ray is started here. Ray accepts no smaller size, and a larger one is not
needed, because trajectories travel in messages and not through the object store."""


def import_ray() -> Any:
    """Import the optional package `ray`. Raises UsageError if it is not installed."""
    refuse_without("ray", extra="ray", what="a rollout on actors")
    import ray

    return ray


@contextlib.contextmanager
def ray_running(
    address: str | None = None, *, num_cpus: int | None = None, only_episodes: bool = True
) -> Iterator[Any]:
    """Context manager for a connection to Ray. The arguments are those of `connect`. If this process is already
    connected, that connection is used, and stays open."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    connect(ray, address, num_cpus=num_cpus, only_episodes=only_episodes)
    try:
        yield ray
    finally:
        ray.shutdown()


def connect(ray: Any, address: str | None = None, *, num_cpus: int | None = None, only_episodes: bool = True) -> None:
    """Connect this process to a cluster, without Ray's output.

    Args:
        ray: The package `ray`.
        address: "auto" for the cluster that this host belongs to, or an address such as "10.0.0.1:6379". With None, a
            cluster is started on this machine.
        num_cpus: Number of CPUs of a cluster that is started here. By default all CPUs.
        only_episodes: True if a cluster that is started here runs nothing but episodes; it then has no GPUs, and a
            small object store.

    Raises:
        UsageError: there is no cluster at this address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by the processes that Ray starts
    # With num_gpus = 0, Ray leaves the visible devices as they are. This is Ray's future default; without it Ray warns.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        quiet |= {"num_cpus": num_cpus, "include_dashboard": False}
        if only_episodes:
            quiet |= {"num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        if address not in (None, "auto"):
            _knock(str(address))
        ray.init(address or "local", **quiet)
    except Exception as error:  # Ray also raises bare `Exception`s
        where = f'at address = "{address}"' if address else "on this machine"
        or_here = ', or set cluster.address = "local" to have one started here' if address else ""
        raise UsageError(
            f"no Ray {where}: {str(error).rstrip('. ')}. Start one with `ray start --head` (and "
            f"`ray start --address=...` on the other hosts){or_here}"
        ) from error


def said_by_ray(error: BaseException) -> str:
    """What an error of Ray says, on one line, without its list of possible causes."""
    text = " ".join(str(error).split()).partition(" Some common causes include")[0][:500]
    return text or type(error).__name__


def _knock(address: str) -> None:
    """Check that a server answers at the address, because Ray would retry a missing cluster for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError('expected "auto", or an address such as "10.0.0.1:6379"')
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
