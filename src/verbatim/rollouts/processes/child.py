"""Runs in a worker process, and talks to the run over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import itertools
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from verbatim import errors
from verbatim.errors import RecordError, SamplerFault, UsageError
from verbatim.inference.base import Completion, SampleRequest
from verbatim.rollouts.main_loop import run_main
from verbatim.rollouts.processes.frames import Frames
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers.episodes import EpisodePlan, WorkerEpisodes
from verbatim.rollouts.workers.worker_context import WorkerContext
from verbatim.texts import error_text
from verbatim.types import Float32, Int32
from verbatim.user_code import is_ctrl_c

MOST_FILES = 16_384
"""Most open file descriptors of a worker, as far as the system allows."""
_PR_SET_PDEATHSIG = 1
_FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM)


def main(descriptor: int, parent: int) -> None:
    """Run episodes until the other end of the socket is closed.

    Args:
        descriptor: The socket's file descriptor.
        parent: Process id of the other end.
    """
    die_with(parent)
    _prepare_process()
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps output that precedes a crash
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s")
    # Handlers rather than SIG_IGN, which programs started by environments would inherit. Ctrl-C and a supervisor's
    # SIGTERM are for the run, which decides when its workers end.
    for number in _FOR_THE_RUN:
        signal.signal(number, lambda number, frame: None)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=functools.partial(_be_a_copy, connection))
    run_main(_serve(connection))


def _be_a_copy(connection: socket.socket) -> None:
    """Detach a forked copy of this process from the run, and restore its signal handlers."""
    connection.close()
    for number in _FOR_THE_RUN:
        signal.signal(number, signal.SIG_DFL)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, for any reason."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _prepare_process() -> None:
    """Make the kernel kill workers before trainer and sampler when memory runs out; and raise the limit of open files
    for environments."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(connection: socket.socket) -> None:
    child = _Child()
    frames = Frames(child.received)
    child.frames = frames
    await asyncio.get_running_loop().create_unix_connection(lambda: frames, sock=connection)
    try:
        context, facts, packed = await child.begun
        context.apply_exactly()
        plan: EpisodePlan = pickle.loads(packed)  # noqa: S301  (from the parent process)
        sampler = child.sampler = ParentSampler(frames.send, **facts)
        async with contextlib.AsyncExitStack() as stack:
            child.episodes = await stack.enter_async_context(WorkerEpisodes.made(plan, sampler))
            frames.send("ready", os.getpid())
            await frames.closed
            await child.end()
    except BaseException as error:
        if child.episodes is not None or is_ctrl_c(error) or isinstance(error, asyncio.CancelledError):
            raise
        # `sys.exit` while an environment is created is a failure.
        said = str(error) if isinstance(error, UsageError) else error_text(error)
        frames.send("refused", said)
        frames.close()
        await frames.closed


class ParentSampler:
    """A `Sampler` at the other end of the socket.

    Args:
        send: Sends a message to the other end.
        context_length: Context length of the sampler in tokens.
        vocab_size: Vocabulary size of the sampler.
        policy_version: Version of its weights at the start.
    """

    def __init__(
        self, send: Callable[..., None], *, context_length: int, vocab_size: int, policy_version: int
    ) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.policy_version = policy_version

    async def generate(self, request: SampleRequest) -> Completion:
        """The engine's completion. Cancelling the call cancels it there.

        Raises:
            SamplerFault: the engine failed for good.
            RecordError: the prompt is empty, too long, or holds ids outside the vocabulary.
        """
        completion: Completion = await self._ask("generate", request)
        if completion.policy_versions is not None and len(completion.ids):
            self.policy_version = int(completion.policy_versions[-1])
        return completion

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it: float32 [L]; the first is NaN."""
        return np.asarray(await self._ask("prompt_logprobs", token_ids, temperature), dtype=np.float32)

    async def update_weights(self, path: Path, version: int) -> None:
        """Refused.

        Raises:
            SamplerFault: always.
        """
        raise SamplerFault("the run loads its weights itself")

    async def close(self) -> None:
        """Do nothing: the sampler belongs to the run."""

    def answered(self, number: int, value: Any) -> None:
        """Deliver the result of a call."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def failed(self, number: int, kind: str, message: str) -> None:
        """Deliver the error of a call."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_exception(RecordError(message) if kind == "RecordError" else SamplerFault(message))

    async def _ask(self, method: str, *given: Any) -> Any:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("ask", number, method, *given)
            return await waiting
        except asyncio.CancelledError:
            self._send("leave", number)
            raise
        finally:
            del self._waiting[number]


class _Child:
    """Handles messages of the run. Each message is a method's name and its arguments."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[tuple[WorkerContext, dict[str, int], bytes]] = loop.create_future()
        self.frames: Frames | None = None
        self.episodes: WorkerEpisodes | None = None
        self.sampler: ParentSampler | None = None
        self._episodes_running: dict[int, asyncio.Task[None]] = {}

    def received(self, what: str, *parts: Any) -> None:
        """Handle one message."""
        methods: dict[str, Callable[..., None]] = {
            "begin": self._begin, "run": self._run, "cancel": self._cancel, "answer": self._answer,
            "fail": self._fail,
        }  # fmt: skip
        methods[what](*parts)

    async def end(self) -> None:
        """Cancel running episodes, so that they are closed, after the run has ended."""
        running = list(self._episodes_running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, context: WorkerContext, facts: dict[str, int], plan: bytes) -> None:
        self.begun.set_result((context, facts, plan))

    def _run(self, number: int, label: str, packed: bytes) -> None:
        task = asyncio.create_task(self._run_one(number, label, packed), name=f"episode-{number}")
        self._episodes_running[number] = task
        task.add_done_callback(lambda _: self._episodes_running.pop(number))

    async def _run_one(self, number: int, label: str, packed: bytes) -> None:
        assert self.episodes is not None and self.frames is not None
        try:
            task: EpisodeTask = pickle.loads(packed)  # noqa: S301  (as above)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            self.frames.send("unread", number, error_text(error, 500))
            return
        try:
            self.frames.send("ended", number, await self.episodes.run(label, task))
        except Exception as error:  # noqa: BLE001  (a fault of this package or of the model: the run is notified)
            kind = type(error).__name__ if isinstance(error, errors.VerbatimError) else ""
            self.frames.send("broke", number, kind, error_text(error) if not kind else str(error))

    def _cancel(self, number: int) -> None:
        if number in self._episodes_running:
            self._episodes_running[number].cancel()

    def _answer(self, number: int, value: Any) -> None:
        if self.sampler is not None:
            self.sampler.answered(number, value)

    def _fail(self, number: int, kind: str, message: str) -> None:
        if self.sampler is not None:
            self.sampler.failed(number, kind, message)
