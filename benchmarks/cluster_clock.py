"""An event loop on virtual time: it jumps to the next event, and may be charged for the processor time of the code.

`cluster.py` runs the orchestrator on it. What is simulated (servers, tools, the trainer) happens inside `select` or
`uncharged`, outside of the code that is measured. With `charge = 0` the processor is infinitely fast. With `charge = 1`
virtual time also moves on with the processor time of everything else: one core of this machine runs the orchestrator,
and nothing beside it.

The processor's clock is read where the code ends and what is simulated begins, and the other way round, several times
for each turn: `time()` stands still in between.
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
    """A context manager for simulated work on the loop's thread, whose processor time is not that of the code."""

    __slots__ = ("_loop",)

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.count_code()

    def __exit__(self, *_: object) -> None:
        self._loop.count_simulated()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual.

    Calls of `run_in_executor` run at once on the loop's thread. Where the processor is charged, their result comes when
    two threads that share one core would have it, and the loop is half as fast until then.

    Args:
        charge: Virtual seconds for each second of processor time: 0 or 1.
        clock: The processor time of this thread, in seconds.
    """

    def __init__(self, charge: float = 0.0, clock: Callable[[], float] = thread_time) -> None:
        self._now = 0.0
        self._rate = self.charge = charge
        self._clock = clock
        self._counted = clock()
        self.code_seconds = 0.0
        """Processor time of the code that runs on the loop, since it was made."""
        self.simulated_seconds = 0.0
        """Processor time of what is simulated."""
        self.thread_seconds = 0.0
        """Processor time of calls on threads."""
        self.wire_seconds = 0.0
        """Processor time that messages would have taken, as told by `spend`."""
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._busy_threads = 0
        self.uncharged = Uncharged(self)
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def count_code(self) -> None:
        """What ran since the last count was the code."""
        now = self._clock()
        seconds, self._counted = now - self._counted, now
        self.code_seconds += seconds
        self._now += self._rate * seconds

    def count_simulated(self) -> None:
        """What ran since the last count was simulated."""
        now = self._clock()
        self.simulated_seconds += now - self._counted
        self._counted = now

    def spend(self, seconds: float) -> None:
        """A message whose processor time is known, and is not spent here."""
        self.wire_seconds += seconds
        if self.charge:
            self._now += self._rate * seconds

    def at(self, when: float, happen: Callable[[Any], None], what: Any = None) -> None:
        """Call `happen(what)` at this virtual time, outside of the code that is measured."""
        heapq.heappush(self._events, (when, next(self._order), happen, what))

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """To be awaited: a wait of something that is simulated."""
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
        """Let time pass until a timer of the loop or a simulated event is due, and let those events happen."""
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
    """No file is ever ready: calls on threads run at once, so no thread wakes the loop."""

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
    """The virtual loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


@contextmanager
def virtual_runner(charge: float, clock: Callable[[], float] = thread_time) -> Iterator[asyncio.Runner]:
    """A runner of coroutines on virtual time; `charge` and `clock` as those of `VirtualLoop`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(charge, clock)) as runner:
        yield runner
