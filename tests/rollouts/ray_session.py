"""One small local Ray for all tests that ask for it."""

import os

import pytest

from ray_workers import warm_workers
from verbatim.rollouts.ray.cluster import ray_running


@pytest.fixture(scope="session")
def local_ray():
    """A Ray of four CPUs: two for the actors that tests share, two for those of a single test."""
    before = os.environ.get("PYTHONBREAKPOINT")
    with warm_workers(), ray_running(num_cpus=4) as ray:
        if before is None:
            os.environ.pop("PYTHONBREAKPOINT", None)  # Ray sets it, for all processes that later tests start
        yield ray
