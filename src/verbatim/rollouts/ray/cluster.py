"""Ray, found or started quietly."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from verbatim.errors import UsageError

OBJECT_STORE_BYTES = 80 * 2**20
"""Of a Ray that is started here: the smallest that it takes, as trajectories travel inside of messages."""


def import_ray() -> Any:
    """The package, which only those need who use it.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("rollouts on actors need Ray: pip install 'verbatim-rl[ray]'") from None
    return ray


@contextlib.contextmanager
def ray_running(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[Any]:
    """Ray for as long as the block lasts. One that this process is connected to already is taken, and left running.

    Args:
        address: Of a cluster: "auto" for the one that this host belongs to, or "10.0.0.1:6379"; None starts one here.
        num_cpus: Of one that is started here; by default as many as there are.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at this address.
    """
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
    """Connect this process to a cluster, or to one that is started for it, without a word on the terminal."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by the processes that Ray starts
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        quiet |= {"num_cpus": num_cpus, "num_gpus": 0, "include_dashboard": False,
                  "object_store_memory": OBJECT_STORE_BYTES}  # fmt: skip
    try:
        if address not in (None, "auto"):
            _knock(str(address))
        ray.init(address or "local", **quiet)
    except Exception as error:  # Ray raises bare ones, too
        where = f'at address = "{address}"' if address else "on this machine"
        raise UsageError(
            f"no Ray {where}: {error}. Start one with `ray start --head` (and `ray start --address=...` on the other "
            "hosts), or give no address to have one started here"
        ) from error


def _knock(address: str) -> None:
    """Ray tries a cluster that is not there for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError('expected "auto", or an address such as "10.0.0.1:6379"')
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
