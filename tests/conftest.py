"""One thread for torch: the tests' models are so small that a second one only waits for the first.

Hypothesis draws the same examples in every run, however slow the machine; `--hypothesis-profile=searching` draws
others.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
from hypothesis import settings

from token_identity import watched

settings.register_profile("searching", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Shells let what they start in the background ignore Ctrl-C; tests send it to themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def every_episode_is_token_exact() -> Iterator[None]:
    """Whatever episode a test plays, it is held against what its sampler returned."""
    with watched() as watch:
        yield
    assert watch.wrong == []
