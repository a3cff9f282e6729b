"""Spreads what one client does over time, so that a client that does it without end leaves the others theirs."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """So many things a second, and some at once.

    Args:
        per_second: In the long run.
        burst: At once, after a quiet while.
        now: The clock, in seconds.
    """

    def __init__(self, per_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._apart, self._burst, self._now = 1 / per_second, burst / per_second, now
        self._due = 0.0
        """When the next thing would be due if all were spread evenly."""

    def delay(self) -> float:
        """Count one thing; returns the seconds that it has to wait.

        >>> pace = Pace(10, 2, now=lambda: 5.0)
        >>> [round(pace.delay(), 3) for _ in range(4)]
        [0.0, 0.0, 0.1, 0.2]
        """
        now = self._now()
        self._due = max(self._due, now) + self._apart
        return max(0.0, self._due - now - self._burst)
