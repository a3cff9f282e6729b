"""Ctrl-C where a loop runs already, and the work has a thread and a loop of its own."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from verbatim.rollouts.main_loop import run_in_program
from waiting import HANGS

pytestmark = pytest.mark.realtime


def pressed_at_its_thread(presses: int, asked: list[str]) -> str:
    """What the work returns that was interrupted, by signals that another thread than the main one receives."""

    told = asyncio.Event()

    def ask(loop: asyncio.AbstractEventLoop) -> bool:
        asked.append("end")
        loop.call_soon_threadsafe(told.set)
        return True

    async def work() -> str:
        async with asyncio.timeout(HANGS):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            await told.wait()
            for _ in range(presses - 1):
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                await asyncio.Event().wait()
        return "ended"

    async def notebook() -> str:
        return run_in_program(work(), ask)

    return asyncio.run(notebook())


def test_the_first_one_asks_for_the_end_and_the_work_ends_itself():
    asked: list[str] = []
    assert pressed_at_its_thread(1, asked) == "ended"
    assert asked == ["end"]


def test_the_second_one_cancels_the_work():
    asked: list[str] = []
    with pytest.raises(KeyboardInterrupt, match=r"^Ctrl-C$"):
        pressed_at_its_thread(2, asked)
    assert asked == ["end"]
