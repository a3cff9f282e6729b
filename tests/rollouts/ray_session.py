"""One small local Ray for all tests that ask for it."""

import pytest

from verbatim.rollouts.ray.cluster import ray_running


@pytest.fixture(scope="session")
def local_ray():
    """A Ray of two CPUs; skipping nothing: whoever asks for it needs the extra."""
    with ray_running(num_cpus=2) as ray:
        yield ray
