"""What exists before a test is left out of the garbage collections that it asks for.

A run begins with a look through everything that there is (`verbatim.run.orchestrator.gc_policy`). In a process that
holds the whole suite that takes longer than a tiny run.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def collections_see_what_is_new() -> None:
    """Before each test."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_a_module_leaves_is_collected() -> Iterator[None]:
    """After the last test of a module: what its tests have left in cycles, models among it."""
    gc.freeze()  # before the runs of the module's fixtures
    yield
    gc.unfreeze()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def runs_do_not_look_for_garbage() -> Iterator[None]:
    """For runs in this process; commands in their own process do, as `run/orchestrator/test_gc_policy.py` tests."""
    with no_search_for_garbage():
        yield


@contextlib.contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """Garbage is collected only when a test asks for it. `gc.disable` would not do: commands enable the collector when
    they have imported what they need."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
