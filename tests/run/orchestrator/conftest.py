"""Runs of this folder are on a clock that jumps from event to event (virtual_runs.py), so that nothing depends on the
speed of the machine. Those marked `realtime` are on the machine's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from run.orchestrator.virtual_runs import JumpingLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("realtime") is not None:
        return {"real": asyncio.new_event_loop}
    return {"virtual": JumpingLoop}
