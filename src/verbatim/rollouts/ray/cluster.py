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
"""Object store size of a Ray started here: the smallest that Ray accepts, because trajectories travel in messages."""


def import_ray() -> Any:
    """Import the optional package `ray`. Raises UsageError if it is not installed."""
    refuse_without("ray", extra="ray", what="a rollout on actors")
    import ray

    return ray


@contextlib.contextmanager
def ray_running(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[Any]:
    """Context manager for a connection to Ray; `address` and `num_cpus` as for `connect`. If this process is already
    connected, that connection is used and stays open."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    connect(ray, address, num_cpus=num_cpus)
    try:
        yield ray
    finally:
        ray.shutdown()


def connect(ray: Any, address: str | None = None, *, num_cpus: int | None = None) -> None:
    """Connect this process to a cluster, without output.

    Args:
        ray: The package.
        address: "auto" for the cluster that this host belongs to, or an address such as "10.0.0.1:6379"; None starts a
            cluster on this machine.
        num_cpus: CPUs of a cluster started here; by default all.

    Raises:
        UsageError: there is no cluster at this address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by the processes that Ray starts
    # Leave the visible devices as they are with num_gpus = 0, which is also Ray's future default; without it Ray warns.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        quiet |= {
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        if address not in (None, "auto"):
            _knock(str(address))
        ray.init(address or "local", **quiet)
    except Exception as error:  # Ray also raises bare `Exception`s
        where = f'at address = "{address}"' if address else "on this machine"
        raise UsageError(
            f"no Ray {where}: {error}. Start one with `ray start --head` (and `ray start --address=...` on the other "
            "hosts), or give no address to have one started here"
        ) from error


def _knock(address: str) -> None:
    """Check that the address answers; Ray would retry a missing cluster for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError('expected "auto", or an address such as "10.0.0.1:6379"')
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
