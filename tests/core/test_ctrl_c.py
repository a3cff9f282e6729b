"""Which KeyboardInterrupt is of the keyboard, and which one a user's code raised."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from verbatim.core.ctrl_c import is_ctrl_c, noticed


@pytest.fixture
def handled_by() -> Iterator[Callable[[object], None]]:
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    return caught.value


def raises() -> None:
    raise KeyboardInterrupt


def pressed() -> None:
    signal.raise_signal(signal.SIGINT)


def test_what_a_programs_own_handler_raises_is_ctrl_c_and_what_its_tools_raise_is_not(handled_by):
    handled_by(lambda number, frame: raises())
    assert is_ctrl_c(raised(pressed))
    assert not is_ctrl_c(raised(raises))
    assert not is_ctrl_c(SystemExit())


def test_under_asyncio_the_second_one_raises_and_the_first_one_is_noticed():
    seen, told = [], []

    async def press_twice() -> None:
        before = signal.getsignal(signal.SIGINT)
        with noticed() as by_ctrl_c:
            seen.append(by_ctrl_c())
            pressed()
            seen.append(by_ctrl_c())
            second = raised(pressed)
            told.append(is_ctrl_c(second))
        told.extend([is_ctrl_c(second), is_ctrl_c(raised(raises)), signal.getsignal(signal.SIGINT) is before])
        with noticed() as by_ctrl_c:
            asyncio.current_task().cancel()
            asyncio.current_task().uncancel()
            seen.append(by_ctrl_c())
        await asyncio.sleep(0)

    with pytest.raises(KeyboardInterrupt):  # asyncio's, for the first one
        asyncio.run(press_twice())
    assert seen == [False, True, False]
    assert told == [True, True, False, True]


def test_a_handler_that_a_tool_installs_stays(handled_by):
    async def install() -> bool:
        with noticed():
            handled_by(signal.SIG_IGN)
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    assert asyncio.run(install())
