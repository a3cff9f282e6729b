"""Defines an event loop on virtual time. Time jumps to the next event, and may also advance with the processor time of
the code.

`cluster.py` runs the orchestrator on this loop. The simulated parts (servers, tools, the trainer) run inside `select`
or `uncharged`, separate from the code that is measured. With `charge = 0`, the processor is infinitely fast. With
`charge = 1`, virtual time also advances by the processor time of the measured code, as if one core of this machine ran
the orchestrator and nothing else.

The processor's clock is read whenever execution changes between measured code and simulated parts, which happens
several times per turn. Between two readings, `time()` stands still.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any


class Uncharged:
    """A context manager for simulated work on the loop's thread. The processor time in the block is not counted as that
    of the measured code."""

    __slots__ = ("_loop",)

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.count_code()

    def __exit__(self, *_: object) -> None:
        self._loop.count_simulated()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual.

    Calls of `run_in_executor` run immediately on the loop's thread. If processor time is charged, their result is
    delivered at the time at which two threads that share one core would have it, and the loop runs at half speed until
    then.

    Args:
        charge: Virtual seconds that pass for each second of processor time: 0 or 1.
        clock: Returns the processor time of this thread in seconds.
    """

    def __init__(self, charge: float = 0.0, clock: Callable[[], float] = thread_time) -> None:
        self._now = 0.0
        self._rate = self.charge = charge
        self._clock = clock
        self._counted = clock()
        self.code_seconds = 0.0
        """Processor seconds of the measured code since the loop was created."""
        self.simulated_seconds = 0.0
        """Processor seconds of the simulated parts."""
        self.thread_seconds = 0.0
        """Processor seconds of calls that would run on other threads."""
        self.wire_seconds = 0.0
        """Processor seconds that messages would have taken, as reported to `spend`."""
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._busy_threads = 0
        self.uncharged = Uncharged(self)
        super().__init__(_Selector(self))

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now

    def count_code(self) -> None:
        """Count the processor time since the last count as time of the measured code."""
        now = self._clock()
        seconds, self._counted = now - self._counted, now
        self.code_seconds += seconds
        self._now += self._rate * seconds

    def count_simulated(self) -> None:
        """Count the processor time since the last count as time of the simulated parts."""
        now = self._clock()
        self.simulated_seconds += now - self._counted
        self._counted = now

    def spend(self, seconds: float) -> None:
        """Count the known processor time of a message, which this process does not really spend."""
        self.wire_seconds += seconds
        if self.charge:
            self._now += self._rate * seconds

    def at(self, when: float, happen: Callable[[Any], None], what: Any = None) -> None:
        """Schedule a call of `happen(what)` at this virtual time, as a simulated part."""
        heapq.heappush(self._events, (when, next(self._order), happen, what))

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """Return a future that is done after this number of virtual seconds, for waits of simulated parts."""
        done = self.create_future()
        self.at(self._now + seconds, _finish, done)
        return done

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self.count_code()
        done, began = self.create_future(), self._counted
        try:
            result, error = func(*args), None
        except Exception as raised:  # noqa: BLE001  carried to the caller
            result, error = None, raised
        self._counted = self._clock()
        seconds = self._counted - began
        self.thread_seconds += seconds

        def deliver(_: Any) -> None:
            self._thread_begins(-1)
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(result)

        self._thread_begins(+1)
        self.at(self._now + 2 * self.charge * seconds, deliver)
        return done

    def _thread_begins(self, more: int) -> None:
        self._busy_threads += more
        self._rate = self.charge * (2 if self._busy_threads else 1)

    def wait(self, timeout: float | None) -> None:
        """Advance time until a timer of the loop or a simulated event is due, and run the simulated events that are
        due."""
        until = None if timeout is None else self._now + timeout
        self.count_code()
        if until is None or until > self._now:
            due = [] if until is None else [until]
            due += [self._events[0][0]] if self._events else []
            assert due, "everything waits, and nothing will happen"
            self._now = max(self._now, min(due))
        now, events = self._now, self._events
        while events and events[0][0] <= now:
            _, _, happen, what = heapq.heappop(events)
            happen(what)
        self.count_simulated()


class _Selector(selectors.DefaultSelector):
    """A selector in which no file is ever ready. No thread needs to wake the loop, because all calls run on its own
    thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.wait(timeout)
        return []


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def running() -> VirtualLoop:
    """The running event loop, which must be a `VirtualLoop`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@contextmanager
def virtual_runner(charge: float, clock: Callable[[], float] = thread_time) -> Iterator[asyncio.Runner]:
    """Yield a runner of coroutines on virtual time. `charge` and `clock` are those of `VirtualLoop`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(charge, clock)) as runner:
        yield runner
