"""Functions that may block run on threads which are kept for the next call."""

import asyncio
import contextvars
import gc
import multiprocessing
import threading
import time
import weakref

import pytest

from verbatim.tools import threads
from verbatim.tools.threads import in_thread

CALLER = contextvars.ContextVar("caller")


def test_calls_one_after_the_other_share_a_thread(monkeypatch):
    started = []

    class Counted(threads._Worker):
        def __init__(self):
            started.append(self)
            super().__init__()

    monkeypatch.setattr(threads, "_Worker", Counted)
    monkeypatch.setattr(threads, "_idle", [])

    async def many():
        return {await in_thread(threading.get_ident) for _ in range(50)}

    assert threading.get_ident() not in asyncio.run(many())
    assert len(started) <= 1  # none where a thread that another test left behind comes to its end


def test_calls_at_a_time_have_a_thread_each():
    together = threading.Barrier(40)

    async def many():
        return await asyncio.gather(*(in_thread(lambda: together.wait(60)) for _ in range(40)))

    assert sorted(asyncio.run(many())) == list(range(40))


def test_a_call_that_hangs_holds_no_other():
    end = threading.Event()

    async def beside():
        hanging = asyncio.ensure_future(in_thread(lambda: end.wait(60)))
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
        for _ in range(3000):
            if gone() is None:
                return True
            await asyncio.sleep(0.01)
        return False

    assert asyncio.run(call())


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
        for _ in range(3000):  # the thread may still be on its way out of the call
            if held[0]() is None:
                break
            time.sleep(0.01)
        assert held[0]() is None
    finally:
        gc.enable()


def test_an_idle_thread_ends_and_the_next_call_starts_another(monkeypatch):
    monkeypatch.setattr(threads, "KEPT_SECONDS", 0.05)
    monkeypatch.setattr(threads, "_idle", [])

    async def twice():
        first = await in_thread(threading.current_thread)
        await asyncio.to_thread(first.join, 60)
        assert not first.is_alive() and threads._idle == []
        second = await in_thread(threading.current_thread)
        return first is second

    assert not asyncio.run(twice())


def test_a_burst_of_calls_leaves_no_more_threads_than_are_kept(monkeypatch):
    monkeypatch.setattr(threads, "MOST_KEPT", 8)
    monkeypatch.setattr(threads, "_idle", [])

    async def burst(count):
        together = threading.Barrier(count)

        def call():
            together.wait(60)
            return threading.current_thread()

        return {*await asyncio.gather(*(in_thread(call) for _ in range(count)))}

    async def two():
        found = await burst(40)
        kept = len(threads._idle)
        monkeypatch.setattr(threads, "KEPT_SECONDS", 0.01)
        await burst(kept)
        for thread in found:
            await asyncio.to_thread(thread.join, 60)
        return len(found), kept, any(thread.is_alive() for thread in found)

    count, kept, alive = asyncio.run(two())
    assert (count, alive) == (40, False)
    assert 8 <= kept <= 16, "a few more, where several threads look at a time"


def _calls(result):
    result.put(asyncio.run(in_thread(lambda: "forked")))


def test_a_forked_process_starts_its_own():
    assert asyncio.run(in_thread(lambda: 1)) == 1
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    process = context.Process(target=_calls, args=(result,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and result.get() == "forked"
