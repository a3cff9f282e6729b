"""Whoever holds up the event loop is named, and how long everybody waited is measured."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from verbatim.run.orchestrator.loop_lag import INTERVAL, LoopLag
from waiting import wait_until


class Clock:
    """The loop's virtual time, which a test may move on; `looks` are those of the watching thread."""

    def __init__(self):
        self.loop, self.own, self.looks = asyncio.get_running_loop(), threading.get_ident(), 0

    def __call__(self):
        self.looks += threading.get_ident() != self.own
        return self.loop.now

    def stand_still(self, seconds):
        """Nothing that runs on the loop lets others go on for so long."""
        self.loop.now += seconds

    def wait_for_looks(self, count):
        before = self.looks
        wait_until(lambda: self.looks >= before + count)


def think_hard(clock, seconds, enough):
    """An environment that computes where it should await."""
    clock.stand_still(seconds)
    wait_until(enough)
    clock.stand_still(seconds)
    clock.wait_for_looks(3)


async def test_code_that_blocks_the_event_loop_is_named_with_its_line_once(caplog):
    clock = Clock()
    lag = LoopLag(blocked_after=2 * INTERVAL, clock=clock)
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(2.5 * INTERVAL)
        think_hard(clock, 0.4, lambda: "the event loop has been blocked" in caplog.text)
        await asyncio.sleep(0)
    lag.close()
    (record,) = caplog.records
    assert 'test_loop_lag.py", line' in record.message and "think_hard(clock, 0.4" in record.message
    assert "await asyncio.to_thread(...)" in record.message


async def test_the_time_that_everybody_waited_is_measured_even_before_the_loop_ticks_again():
    clock = Clock()
    lag = LoopLag(clock=clock)
    await asyncio.sleep(2.5 * INTERVAL)
    assert lag.read() == {"loop/lag_mean": 0.0, "loop/lag_max": 0.0}
    clock.stand_still(0.4)
    assert lag.read()["loop/lag_max"] == pytest.approx(0.4 - 0.5 * INTERVAL)
    await asyncio.sleep(2.5 * INTERVAL)
    seen = lag.read()
    assert seen["loop/lag_max"] == pytest.approx(0.4 - 0.5 * INTERVAL)  # its own measurement, which came late
    assert 0 < seen["loop/lag_mean"] < seen["loop/lag_max"]
    assert lag.read() == {"loop/lag_mean": 0.0, "loop/lag_max": 0.0}  # of the time since the last look
    lag.close()


async def test_a_loop_that_turns_is_accused_of_nothing(caplog):
    """However often the watching thread looks, the loop has ticked just before."""
    clock = Clock()
    lag = LoopLag(blocked_after=2 * INTERVAL, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await asyncio.sleep(20 * INTERVAL)
            clock.wait_for_looks(1)
    lag.close()
    assert clock.looks >= 5
    assert caplog.records == []
