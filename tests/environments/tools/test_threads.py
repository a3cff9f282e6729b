"""Functions that may block run on threads which are kept for the next call."""

import asyncio
import contextvars
import functools
import gc
import multiprocessing
import threading
import weakref

import pytest

from verbatim.environments.tools import threads
from verbatim.environments.tools.threads import in_thread
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime
CALLER = contextvars.ContextVar("caller")


def test_calls_one_after_the_other_share_a_thread(monkeypatch):
    before = set(threading.enumerate())  # those that other tests left behind may take a call too
    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads, "KEPT_SECONDS", HANGS)

    async def many():
        return {await in_thread(threading.current_thread) for _ in range(50)}

    found = asyncio.run(many())
    assert threading.main_thread() not in found and len(found - before) <= 1


def test_calls_at_a_time_have_a_thread_each():
    together = threading.Barrier(40)

    async def many():
        return await asyncio.gather(*(in_thread(lambda: together.wait(HANGS)) for _ in range(40)))

    assert sorted(asyncio.run(many())) == list(range(40))


def test_a_call_that_hangs_holds_no_other():
    end = threading.Event()

    async def beside():
        hanging = asyncio.ensure_future(in_thread(end.wait))
        assert [await in_thread(lambda: 1) for _ in range(5)] == 5 * [1]
        hanging.cancel()
        end.set()

    asyncio.run(beside())


def test_the_callers_context_variables_are_seen_and_not_changed():
    def call():
        seen = CALLER.get()
        CALLER.set("callee")
        return seen

    async def two():
        CALLER.set("first")
        found = [await in_thread(call), CALLER.get()]
        CALLER.set("second")
        return [*found, await in_thread(call)]

    assert asyncio.run(two()) == ["first", "first", "second"]


def test_what_is_raised_reaches_the_caller_and_the_thread_goes_on():
    def fails(error):
        raise error

    async def each():
        for error, seen in ((KeyError("a"), KeyError), (StopIteration("b"), RuntimeError), (SystemExit(3), SystemExit)):
            with pytest.raises(seen):
                await in_thread(lambda error=error: fails(error))
        return await in_thread(lambda: "goes on")

    assert asyncio.run(each()) == "goes on"


def test_a_thread_that_waits_keeps_nothing_of_its_last_call():
    class Large:
        pass

    async def call():
        gone = weakref.ref(await in_thread(Large))
        await until(lambda: gone() is None)

    asyncio.run(call())


def test_what_a_call_held_that_raised_is_freed_with_its_exception():
    """Without garbage collection: the exception's traceback has the frames, and no frame has the exception."""

    class Large:
        pass

    def fails():
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError("no such town")

    async def call():
        try:
            await in_thread(fails)
        except ValueError:
            return

    held = []
    gc.disable()
    try:
        asyncio.run(call())
        wait_until(lambda: held[0]() is None)  # the thread may still be on its way out of the call
    finally:
        gc.enable()


def test_an_idle_thread_ends_and_the_next_call_starts_another(monkeypatch):
    monkeypatch.setattr(threads, "KEPT_SECONDS", 0.05)
    monkeypatch.setattr(threads, "_idle", [])

    async def twice():
        first = await in_thread(threading.current_thread)
        await asyncio.to_thread(first.join, HANGS)
        assert not first.is_alive()
        second = await asyncio.wait_for(in_thread(threading.current_thread), HANGS)
        return first is second

    assert not asyncio.run(twice())


def test_a_burst_of_calls_leaves_no_more_threads_than_are_kept(monkeypatch):
    """Forty calls at a time, which end one after the other."""
    monkeypatch.setattr(threads, "MOST_KEPT", 8)
    monkeypatch.setattr(threads, "KEPT_SECONDS", HANGS)
    monkeypatch.setattr(threads, "_idle", [])

    async def burst(count):
        together, may_end = threading.Barrier(count + 1), [threading.Event() for _ in range(count)]

        def call(number):
            together.wait(HANGS)
            may_end[number].wait(HANGS)
            return threading.current_thread()

        calls = [asyncio.create_task(in_thread(functools.partial(call, number))) for number in range(count)]
        await asyncio.to_thread(together.wait, HANGS)
        found = []
        for event, each in zip(may_end, calls, strict=True):
            event.set()
            found.append(await each)
        return {*found}

    async def two():
        found = await burst(40)
        await until(lambda: sum(thread.is_alive() for thread in found) == 8)
        monkeypatch.setattr(threads, "KEPT_SECONDS", 0.01)
        assert await burst(8) <= found
        for thread in found:
            await asyncio.to_thread(thread.join, HANGS)
        return len(found), any(thread.is_alive() for thread in found)

    assert asyncio.run(two()) == (40, False)


def _calls(result):
    result.put(asyncio.run(in_thread(lambda: "forked")))


def test_a_forked_process_starts_its_own():
    assert asyncio.run(in_thread(lambda: 1)) == 1
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    process = context.Process(target=_calls, args=(result,))
    process.start()
    process.join(HANGS)
    assert process.exitcode == 0 and result.get() == "forked"
