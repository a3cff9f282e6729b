"""Pools that wait for a replica as long as it takes: what ends a wait is an event, or a limit that a test has set."""

import pytest

from waiting import HANGS


@pytest.fixture(autouse=True)
def endings_take_as_long_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is given up, and a replica that is closed, end in some turns of the event loop."""
    monkeypatch.setattr("verbatim.inference.pool.member.GIVING_UP", HANGS)
    monkeypatch.setattr("verbatim.inference.pool.replica_supervisor.CLOSING", HANGS)
