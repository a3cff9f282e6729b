"""Measures the event loop's lag, and finds the code that blocks the loop if the lag is long."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two measurements."""

BLOCKED_AFTER = 20.0
"""Seconds after which the code that blocks the loop is logged."""


class LoopLag:
    """Measures the lag of the running event loop until it is closed.

    A second thread watches the loop: each time the loop is blocked for `blocked_after` seconds, the line of code that
    blocks it is logged once.

    Args:
        blocked_after: Seconds without a tick of the loop until it counts as blocked.
        clock: Seconds since any fixed time; called from both threads.
    """

    def __init__(self, *, blocked_after: float = BLOCKED_AFTER, clock: Callable[[], float] = time.monotonic) -> None:
        self._blocked_after, self._clock = blocked_after, clock
        self._sum, self._count, self._longest = 0.0, 0, 0.0
        self._ticked = self._clock()
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()
        self._task = asyncio.get_running_loop().create_task(self._measure(), name="loop-lag")
        self._watcher = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._watcher.start()

    def read(self) -> dict[str, float]:
        """The lag since the last call, in seconds: `loop/lag_mean` and `loop/lag_max`; 0 if there was no lag."""
        # This counts a measurement that is overdue right now, because the loop has been busy since the last
        # measurement.
        late_now = max(0.0, self._clock() - self._ticked - INTERVAL)
        mean = self._sum / self._count if self._count else 0.0
        lag = {"loop/lag_mean": mean, "loop/lag_max": max(self._longest, late_now)}
        self._sum, self._count, self._longest = 0.0, 0, 0.0
        return lag

    def close(self) -> None:
        self._ended.set()
        self._task.cancel()
        self._watcher.join()

    async def _measure(self) -> None:
        while True:
            due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._ticked = self._clock()
            late = max(0.0, self._ticked - due)
            self._sum += late
            self._count += 1
            self._longest = max(self._longest, late)

    def _watch(self) -> None:
        named = -1.0
        while not self._ended.wait(min(1.0, self._blocked_after / 4)):
            # The clock is read before the tick: if this thread is suspended in between, the lag is too small, not too
            # big.
            now = self._clock()
            ticked = self._ticked
            blocked = now - ticked
            if blocked > self._blocked_after and ticked != named:
                named = ticked
                frame = sys._current_frames().get(self._loop_thread)
                where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "?"
                logger.warning(
                    "the event loop has been blocked for %.0f s, and the run with it. It is running\n%s"
                    "Run slow code with `await asyncio.to_thread(...)`, or run the environment in separate "
                    "processes (isolated = true)",
                    blocked,
                    where,
                )
