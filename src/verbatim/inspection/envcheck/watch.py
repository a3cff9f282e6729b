"""Runs a coroutine on its own thread and finds code that blocks its event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import verbatim
from verbatim.core.ctrl_c import CtrlC
from verbatim.rollouts.main_loop import run_main

T = TypeVar("T")

BLOCKED = 0.25
"""If the event loop makes no pass for this number of seconds, all spent in the same code, that code counts as
blocking."""
_LOOK_EVERY = 0.05
_MOST_BETWEEN = 0.1
"""Maximum number of seconds to count between two looks at the stack. A longer gap means that the machine was paused."""
_OURS = Path(verbatim.__file__).parent
_THEIRS = (_OURS / "environments", _OURS / "rollouts" / "gateway" / "verifiers")
"""Folders of bundled environments, which are watched in the same way as users' environments."""
_TOOLS = _OURS / "environments" / "tools"
"""The folder of the code that runs tools. It is not watched, although it is in a folder of bundled environments."""
_LIBRARY = Path(asyncio.__file__).parents[1]
"""The folder of Python's standard library."""


class Stuck(Exception):
    """Raised if the event loop was blocked for so long that it was abandoned. `place` names the blocking code."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


class LoopWatch:
    """Runs a coroutine on a separate thread. `blocked` maps each place in the code, such as `my_env.py:31 in look`, to
    the number of seconds for which it blocked the event loop.

    Args:
        give_up_after: The event loop is abandoned if it makes no pass for this number of seconds.
        own: The folder of the environment's package; None if the environment is not in a package.
    """

    def __init__(self, give_up_after: float, own: Path | None = None) -> None:
        self._give_up_after, self._own = give_up_after, own
        self._beat = time.monotonic()
        self.blocked: dict[str, float] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result.

        Raises:
            Stuck: the event loop made no pass for `give_up_after` seconds. The loop's thread keeps running.
            BaseException: the exception that the coroutine raised.
        """
        result: Future[T] = Future()
        presses = CtrlC()

        def main() -> None:
            try:
                result.set_result(run_main(self._beating(work), presses.heard_elsewhere))
            except BaseException as error:  # noqa: BLE001  re-raised in the caller
                result.set_exception(error)

        thread = threading.Thread(target=main, name="verbatim-env-check", daemon=True)
        self._beat = time.monotonic()
        thread.start()
        self._look_until(thread)
        return result.result()

    async def _beating(self, work: Coroutine[Any, Any, T]) -> T:
        async def beat() -> None:
            while True:
                self._beat = time.monotonic()
                await asyncio.sleep(_LOOK_EVERY / 2)

        beats = asyncio.create_task(beat())
        try:
            return await work
        finally:
            beats.cancel()

    def _look_until(self, thread: threading.Thread) -> None:
        """Sample the stack of the loop's thread until the thread ends.

        Code is blamed only if it was seen for at least `BLOCKED` seconds during one pause of the loop, because the
        machine alone may cause a pause.
        """
        place, beat = "", 0.0
        seconds = paused = 0.0  # time seen at this place; time without a pass of the loop
        last = time.monotonic()
        while thread.is_alive():
            thread.join(_LOOK_EVERY)
            now = time.monotonic()
            passed, last = min(now - last, _MOST_BETWEEN), now
            frame = sys._current_frames().get(thread.ident or 0)
            here = _place(frame, self._own) if now - self._beat > _LOOK_EVERY else ""
            turned = self._beat != beat
            seconds = 0.0 if turned or here != place else seconds + passed
            paused = 0.0 if turned else paused + passed
            place, beat = here, self._beat
            if place and seconds >= BLOCKED:
                self.blocked[place] = max(self.blocked.get(place, 0.0), seconds)
            if place and paused > self._give_up_after:
                raise Stuck(place)


def _place(frame: FrameType | None, own: Path | None) -> str:
    """The user's outermost function that the event loop is running, as `my_env.py:31 in look`; "" if no such function
    is running."""
    seen = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "asyncio" and frame.f_code.co_name == "_run":
            return seen  # this frame runs a callback; frames further out belong to the loop
        if _is_the_users(path, own):
            seen = f"{path.name}:{frame.f_code.co_firstlineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _is_the_users(path: Path, own: Path | None) -> bool:
    if _TOOLS in path.parents:
        return False
    if own is not None and own in path.parents:
        return True
    is_ours = _OURS in path.parents and not any(theirs in path.parents for theirs in _THEIRS)
    is_library = "site-packages" in path.parts or _LIBRARY in path.parents or str(path).startswith("<")
    return not is_ours and not is_library
