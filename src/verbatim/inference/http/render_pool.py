"""Renders conversations and parses completions off the event loop, on a thread or in processes.

A chat template is a program, and a tokenizer needs seconds for a megabyte, and both hold the GIL. A server for
untrusted clients therefore renders in other processes, which can be killed. A run's own server renders on a thread.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import os
import pickle
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from verbatim.core.children import kill_group, start_async
from verbatim.core.errors import UsageError, VerbatimError
from verbatim.core.imports import child_environment
from verbatim.core.tasks import cancel_all
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.refused import Refused
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.renderers.renderer_spec import renderer_spec

logger = logging.getLogger(__name__)
T = TypeVar("T")

SMALL = 2**14
"""Maximum bytes of a small request. If there are several processes, one process is reserved for small requests, so that
small requests never wait behind large requests."""
START_SECONDS = 120.0
"""Timeout in seconds for a process to load the renderer."""
_MOST_WAITING = 1024
_MOST_BYTES = 2**28
"""Maximum total bytes of all queued requests."""
_HEADER = struct.Struct("!Q")
"""Length prefix of each frame on the pipes."""


class RenderPool(ABC):
    """Base class of pools that run functions which need the renderer."""

    async def start(self) -> None:  # noqa: B027  (there may be nothing to wait for)
        """Wait until the pool is ready.

        Raises:
            UsageError: the renderer cannot be created; the message has the reason.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop the pool's threads and processes."""

    @abstractmethod
    async def run(self, size: int, work: Callable[..., T], *given: Any, **about: Any) -> T:
        """Call a function of `chat_work` with the renderer.

        Args:
            size: Number of bytes of the request. The smallest queued request runs first.
            work: The function; receives the renderer as the keyword argument `renderer`.
            given: Positional arguments of the function; must be picklable.
            about: Keyword arguments of the function; must be picklable.

        Raises:
            Refused: the call timed out, the queue is full, or the function refused the request.
            VerbatimError: the function raised it.
        """


class ThreadRenderPool(RenderPool):
    """Renders on one thread of this process. No other code may use the renderer at the same time."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verbatim-chat")

    async def close(self) -> None:
        """Stop the thread after its current call."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[..., T], *given: Any, **about: Any) -> T:
        """See `RenderPool.run`."""
        call = functools.partial(work, *given, renderer=self._renderer, **about)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class ProcessRenderPool(RenderPool):
    """Renders in other processes. A process that exceeds a request's time limit is killed and replaced.

    Args:
        renderer: The model's renderer; recreated in each process.
        processes: Number of processes. If there are several, the first accepts only small requests.
        limits: Its `render_seconds` is the time limit of one request.

    Raises:
        UsageError: the renderer cannot be pickled.
    """

    def __init__(self, renderer: Renderer, processes: int, limits: ServerLimits) -> None:
        try:
            self._spec = pickle.dumps(renderer_spec(renderer))
        except Exception as error:  # custom renderers may raise any exception
            raise UsageError(
                f"renderer {renderer.name!r} cannot be recreated in another process ({error}); serve with "
                "chat_processes = 0"
            ) from error
        self._seconds = limits.render_seconds
        self._tasks: list[tuple[int, int, bytes, asyncio.Future[Any]]] = []
        """A heap of (request bytes, sequence number, pickled call, outcome). The sequence number breaks ties, so that
        neither frames nor futures are compared."""
        self._bytes = 0
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()
        self._ready = [asyncio.get_running_loop().create_future() for _ in range(processes)]
        self._workers = [
            asyncio.create_task(
                self._work(most=SMALL if k == 0 and processes > 1 else None, ready=self._ready[k]),
                name=f"chat-process-{k}",
            )
            for k in range(processes)
        ]

    async def start(self) -> None:
        """Wait until all processes have loaded the renderer."""
        await asyncio.gather(*self._ready)

    async def close(self) -> None:
        """Kill the processes."""
        await cancel_all(self._workers)
        for ready in self._ready:  # otherwise a `start` that is still waiting would hang
            ready.cancel()

    async def run(self, size: int, work: Callable[..., T], *given: Any, **about: Any) -> T:
        """See `RenderPool.run`."""
        if len(self._tasks) >= _MOST_WAITING or self._bytes + size > _MOST_BYTES:
            raise Refused(503, "too many conversations are waiting to be rendered; try again")
        frame = pickle.dumps((work, given, about))
        outcome = asyncio.get_running_loop().create_future()
        async with self._changed:
            heapq.heappush(self._tasks, (size, next(self._numbers), frame, outcome))
            self._bytes += size
            self._changed.notify_all()
        done: T = await outcome
        return done

    async def _next(self, most: int | None) -> tuple[bytes, asyncio.Future[Any]]:
        """Wait for a call of at most `most` bytes. Checking the top of the heap is enough, because it is the smallest
        call."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._tasks and (most is None or self._tasks[0][0] <= most))
            size, _, frame, outcome = heapq.heappop(self._tasks)
            self._bytes -= size
            return frame, outcome

    async def _work(self, most: int | None, ready: asyncio.Future[None]) -> None:
        """Keep one process running, and pass it calls of at most `most` bytes."""
        while True:
            try:
                process = await _start(self._spec)
            except UsageError as error:
                if not ready.done():  # if the first start fails, `start` raises and the server does not start
                    ready.set_exception(error)
                    return
                logger.warning("%s", error)  # it has started before, so retry, as memory may only be short for a while
                await asyncio.sleep(1.0)
                continue
            if not ready.done():
                ready.set_result(None)
            try:
                while await self._serve(process, *await self._next(most)):
                    pass
            finally:
                kill_group(process.pid)
                await process.wait()

    async def _serve(self, process: asyncio.subprocess.Process, frame: bytes, outcome: asyncio.Future[Any]) -> bool:
        """Run one call in the process. Returns False if the process must be replaced, because it is still busy or
        dead."""
        if outcome.cancelled():  # the client disconnected
            return True
        result: Any
        usable = False
        try:
            async with asyncio.timeout(self._seconds):
                await _send(process, frame)
                result = await _receive(process)
            usable = True
        except TimeoutError:
            result = Refused(400, f"messages: rendering took more than {self._seconds:g} s, which is the limit")
        except (OSError, EOFError) as error:
            logger.warning("a render process ended (%s); starting another one", error)
            result = Refused(503, "messages: the process that rendered them ended; try again")
        except BaseException:
            outcome.cancel()
            raise
        if not outcome.done():
            if isinstance(result, BaseException):
                outcome.set_exception(result)
            else:
                outcome.set_result(result)
        return usable


async def _start(spec: bytes) -> asyncio.subprocess.Process:
    """Start a render process and wait until it has created the renderer."""
    process = await start_async(
        [sys.executable, "-m", "verbatim.inference.http.render_pool"],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        environment=child_environment(),
    )
    try:
        async with asyncio.timeout(START_SECONDS):
            await _send(process, spec)
            outcome = await _receive(process)
    except (OSError, EOFError, TimeoutError) as error:
        outcome = UsageError(f"a render process did not start: {type(error).__name__} {error}")
    except BaseException:
        kill_group(process.pid)
        raise
    if isinstance(outcome, BaseException):
        kill_group(process.pid)
        await process.wait()
        raise UsageError(f"a render process could not create the renderer: {outcome}")
    return process


async def _send(process: asyncio.subprocess.Process, frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.writelines([_HEADER.pack(len(frame)), frame])
    await process.stdin.drain()


async def _receive(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    (size,) = _HEADER.unpack(await process.stdout.readexactly(_HEADER.size))
    return pickle.loads(await process.stdout.readexactly(size))  # noqa: S301  (from our own child process)


def main() -> None:
    """Entry point of a render process: reads the renderer's spec and then calls from stdin, and writes results to
    stdout."""
    os.nice(5)  # give sampling priority over rendering
    calls_in, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that libraries print to stdout would corrupt the results

    def send(outcome: Any) -> None:
        frame = pickle.dumps(outcome)
        answers.write(_HEADER.pack(len(frame)) + frame)
        answers.flush()

    def receive() -> Any:
        head = calls_in.read(_HEADER.size)
        if len(head) < _HEADER.size:
            sys.exit(0)  # the parent has closed the pipe
        return pickle.loads(calls_in.read(_HEADER.unpack(head)[0]))  # noqa: S301  (from the parent process)

    spec = receive()
    try:
        renderer = spec.make() if hasattr(spec, "make") else spec
    except VerbatimError as error:
        send(error)
        return
    send(None)
    while True:
        work, given, about = receive()
        try:
            send(work(*given, renderer=renderer, **about))
        except (VerbatimError, Refused) as error:
            error.__cause__ = error.__context__ = None
            send(error)


if __name__ == "__main__":
    main()
