"""What the suite holds is left out of garbage collections: tests, modules, tokenizers, a million objects and more.

The collector would look through them while tests are collected, in tests, and at the start of each run
(`verbatim.run.orchestrator.gc_policy`), where that takes longer than a tiny run. Of what a module of tests leaves, what
is garbage is freed after its last test, models among it, and the rest is left out as well.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator

import pytest

_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and leave out what they have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        _FREEZE()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def runs_leave_out_nothing() -> Iterator[None]:
    """A run, or a command in this process, would freeze what earlier tests have left, and at its end unfreeze all."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "freeze", lambda: None)
        patched.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def garbage_of_a_module_is_freed() -> Iterator[None]:
    """After its last test."""
    yield
    gc.collect()
    _FREEZE()


@pytest.fixture(scope="module")
def real_freeze() -> Iterator[None]:
    """For modules that test what is frozen."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "freeze", _FREEZE)
        patched.setattr(gc, "unfreeze", _UNFREEZE)
        yield
        _FREEZE()
