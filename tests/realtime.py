"""Which tests depend on more than their own process: they start processes, or bind or connect sockets.

Such a test can fail because the machine is busy, so it carries the marker `realtime`, as every test does that waits
for something to happen elsewhere; `make stress` runs these again and again on a busy machine. With `--check-realtime`
a test without the marker that starts a process, binds or connects fails, and is told to carry it. Not in CI: of several
tests that share a process, the one that runs first starts it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from durations import ASKS

EVENTS = {
    "subprocess.Popen": "a process",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "socket.bind": "a socket",
    "socket.connect": "a socket",
}
"""What each audit event asks for."""
COMPILERS = {"cc", "gcc", "clang"}
"""Started once by the first test of a process that uses compiled code, so by any test."""


class RealtimeCheck:
    """Watches what each test asks of the system; a fixture of a wider scope asks for all tests that use it.

    What threads ask for counts if the test started them: others may be an earlier test's.

    Args:
        refuse: Whether a test fails that asks for something and lacks the marker.
    """

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self._seen: list[str] = []
        self._main = threading.get_ident()
        self._tests = 0
        self._threads: dict[int, int] = {}  # the test in which each was started
        self._fixtures: dict[object, str] = {}
        self._start = threading.Thread.start
        threading.Thread.start = lambda thread: self._started(thread)  # type: ignore[method-assign]
        sys.addaudithook(self._note)

    def _started(self, thread: threading.Thread) -> None:
        run, test = thread.run, self._tests

        def noted() -> None:
            self._threads[threading.get_ident()] = test
            run()

        thread.run = noted  # type: ignore[method-assign]
        self._start(thread)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        thread = threading.get_ident()
        if event in EVENTS and (thread == self._main or self._threads.get(thread) == self._tests):
            if event == "subprocess.Popen" and os.path.basename(os.fsdecode(arguments[0])) in COMPILERS:
                return
            self._seen.append(EVENTS[event])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What the setup of a module's or session's fixture asks for is remembered with the fixture."""
        before = len(self._seen)
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function" and len(self._seen) > before:
                self._fixtures[fixturedef.func] = min(self._seen[before:])
                del self._seen[before:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Forget what the test before asked for."""
        self._tests += 1
        self._seen.clear()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Refuse a test that asks for something and does not say so."""
        result = yield
        seen = [*self._seen, *(self._fixtures[f] for f in _fixtures_of(item) if f in self._fixtures)]
        if seen:
            item.user_properties.append((ASKS, min(seen)))
            if self._refuse and item.get_closest_marker("realtime") is None:
                pytest.fail(f"it asks for {min(seen)}: such a test carries the marker realtime")
        return result


def _fixtures_of(item: pytest.Item) -> Iterator[object]:
    info = getattr(item, "_fixtureinfo", None)
    for definitions in info.name2fixturedefs.values() if info is not None else ():
        yield from (definition.func for definition in definitions)
