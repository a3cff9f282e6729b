"""Whoever holds up the event loop is named, and how long everybody waited is measured."""

import asyncio
import logging
import time

from verbatim.orchestrator.loop_lag import INTERVAL, LoopLag


def think_hard(seconds, enough=lambda: True):
    """An environment that computes where it should await; so long, and until it is enough or a minute is over."""
    time.sleep(seconds)
    for _ in range(600):
        if enough():
            return
        time.sleep(0.1)


async def test_code_that_blocks_the_event_loop_is_named_with_its_line(caplog):
    lag = LoopLag(blocked_after=0.1)
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(0.06)
        think_hard(0.4, lambda: "think_hard(0.4" in caplog.text)
        await asyncio.sleep(0)
    lag.close()
    stood = [r for r in caplog.records if "event loop has stood still" in r.message]
    (record,) = [r for r in stood if "think_hard(0.4" in r.message]  # once for one block; the machine may add others
    assert "test_loop_lag.py" in record.message
    assert "await asyncio.to_thread(...)" in record.message


async def test_the_time_that_everybody_waited_is_measured_even_before_the_loop_ticks_again():
    lag = LoopLag()
    await asyncio.sleep(2.5 * INTERVAL)
    lag.read()
    think_hard(0.4)
    assert lag.read()["loop/lag_max"] >= 0.3
    await asyncio.sleep(2.5 * INTERVAL)
    seen = lag.read()
    assert seen["loop/lag_max"] >= 0.3  # its own measurement, which came late
    assert 0 < seen["loop/lag_mean"] < seen["loop/lag_max"]
    # Of the time since the last look there is nothing to tell; the machine may stand still at some of the looks.
    assert any(lag.read()["loop/lag_max"] < 0.3 for _ in range(100))
    lag.close()


async def test_a_loop_that_turns_is_accused_of_nothing(caplog):
    """In a stretch in which the machine itself did not stand still: such a one has to come."""
    for _ in range(50):
        caplog.clear()
        lag, longest = LoopLag(blocked_after=0.5), 0.0
        with caplog.at_level(logging.WARNING):
            for _ in range(14):
                began = time.monotonic()
                await asyncio.sleep(0.05)
                longest = max(longest, time.monotonic() - began)
        lag.close()
        if longest < 0.25:
            break
    assert longest < 0.25
    assert caplog.records == []
