"""Starts a worker in a child process of this machine, talks to it over a socket, monitors and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verbatim
from verbatim import errors
from verbatim.errors import RecordError, SamplerFault, UsageError
from verbatim.inference.base import nothing_sampled
from verbatim.rollouts.processes.frames import Frames
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers import worker
from verbatim.rollouts.workers.counting_sampler import CountingSampler
from verbatim.rollouts.workers.worker import CannotBeSent, WorkerLost
from verbatim.rollouts.workers.worker_context import WorkerContext
from verbatim.texts import error_text
from verbatim.user_code import is_ctrl_c

PATIENCE = 2.0
"""Seconds for a worker to end by itself: to close its environments and run their `atexit` functions."""
WATCH_EVERY = 1.0
"""Seconds between two checks of a worker's resources."""
MOST_FILES, MOST_THREADS = 12_000, 1_000
"""Most file descriptors and threads of a worker. One with more is leaking them and is replaced before the system runs
out."""
MOST_LOGGED = 32 * 2**20
"""Most bytes of an environment's log, which is then truncated."""

# This package may lie outside a new interpreter's search path. The working directory is not searched (-P), because it
# may hold modules with names of the standard library. The last argument is the label shown by `ps`.
_START = (
    "import sys; _, root, fd, parent, _ = sys.argv; root in sys.path or sys.path.insert(0, root); "
    "from verbatim.rollouts.processes.child import main; main(int(fd), int(parent))"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessPlan:
    """The settings of one environment's worker processes."""

    label: str
    """The environment's label."""
    plan: bytes
    """The plan of its episodes, from `packed_plan`."""
    context: WorkerContext
    """Working directory and search path of this process."""
    log: Path
    """File for their output."""
    memory_mb: int | None
    """Most memory of one process in MB (2**20 bytes); None = no limit."""


class ProcessWorker:
    """A `Worker` in a process group of its own, which a Ctrl-C at the terminal does not reach.

    It ends with this process, for any reason.

    Args:
        plan: Its settings.
        sampler: Answers its requests.
    """

    def __init__(self, plan: ProcessPlan, sampler: CountingSampler) -> None:
        self._plan = plan
        self._sampler = sampler
        self._process: asyncio.subprocess.Process | None = None
        self._overseeing: asyncio.Task[None] | None = None
        self._frames = Frames(self._received)
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._episodes_running: dict[int, asyncio.Future[bytes]] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._why: str | None = None

    # ---- the Worker protocol

    async def start(self) -> int:
        """Start the process and create the environment in it. Returns the process id.

        Raises:
            UsageError: the system cannot start a process, or the environment could not be created.
        """
        what = f"a worker process of environment {self._plan.label!r}"
        try:
            await self._spawn()
        except OSError as error:
            raise UsageError(f"{what} cannot be started: {error}") from error
        sampler = self._sampler
        facts = {"context_length": sampler.context_length, "vocab_size": sampler.vocab_size,
                 "policy_version": sampler.policy_version}  # fmt: skip
        self._frames.send("begin", self._plan.context, facts, self._plan.plan)
        try:
            async with asyncio.timeout(worker.START_TIMEOUT):
                return await self._ready
        except TimeoutError:
            raise UsageError(f"{what} did not start within {worker.START_TIMEOUT:.0f} s; what it prints is in "
                             f"{self._plan.log}") from None  # fmt: skip
        except WorkerLost as error:
            raise UsageError(f"{what} did not start: {error}{self._last_words()}") from None
        except UsageError as error:
            raise UsageError(f"in {what}: {error}") from None
        finally:
            if not self._ready.done() or self._ready.cancelled() or self._ready.exception() is not None:
                self.kill()

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run one episode.

        Raises:
            WorkerLost: the process has ended; says how.
            CannotBeSent: the example cannot be pickled or unpickled.
        """
        if self._why is not None:
            raise WorkerLost(self._why)
        try:
            packed = pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise CannotBeSent(error_text(error, 500)) from error
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._episodes_running[number] = answer
        self._frames.send("run", number, label, packed)
        try:
            return await answer
        except asyncio.CancelledError:
            self._frames.send("cancel", number)
            raise
        finally:
            del self._episodes_running[number]

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def close(self) -> None:
        """Let the process end by itself for `PATIENCE` seconds; then kill it."""
        if self._overseeing is None:
            return
        self._frames.close()
        await asyncio.wait({self._overseeing}, timeout=PATIENCE)
        self.kill()
        await asyncio.wait({self._overseeing}, timeout=PATIENCE)
        left = {self._overseeing, *self._asking.values()}
        for task in left:
            task.cancel()  # a process that the kernel cannot end is not waited for
        await asyncio.wait(left, timeout=PATIENCE)

    # ---- the process

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(verbatim.__file__).parents[1])
        command = (sys.executable, "-P", "-c", _START, root, str(theirs.fileno()), str(os.getpid()), self._plan.label)
        try:
            with theirs, self._plan.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, env={**_ONE_THREAD, **os.environ},
                )  # fmt: skip
            self._overseeing = asyncio.create_task(self._oversee(self._process), name=f"worker-{self._process.pid}")
            await asyncio.get_running_loop().create_unix_connection(lambda: self._frames, sock=ours)
        except BaseException:
            ours.close()
            self._frames.connection_lost(None)  # also if it was never connected
            self.kill()
            raise

    async def _oversee(self, process: asyncio.subprocess.Process) -> None:
        """Monitor the process until it has ended; its running episodes are then lost."""
        exited, closed = asyncio.create_task(process.wait()), self._frames.closed
        either: set[asyncio.Future[Any]] = {exited, closed}
        try:
            while not (exited.done() or closed.done()):
                await asyncio.wait(either, timeout=WATCH_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if not (exited.done() or closed.done()) and (outgrown := self._outgrown(process.pid)) is not None:
                    self._why = outgrown
                    self.kill()
            # Both happen together, unless the process has closed the socket or a child still holds it.
            await asyncio.wait(either, timeout=PATIENCE)
            self.kill()
            await exited
            _kill_group(process.pid)  # its children
        finally:
            exited.cancel()
            self._frames.close()
            self._end(self._why or self._how_it_ended(process))
            await asyncio.wait({exited})

    def _outgrown(self, pid: int) -> str | None:
        """Which limit the process exceeds; None if none, or if the system does not report it."""
        with contextlib.suppress(OSError):
            if self._plan.log.stat().st_size > MOST_LOGGED:
                os.truncate(self._plan.log, 0)
        try:
            memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 2**20
            num_threads, num_files = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, ValueError, IndexError):
            return None
        limit = self._plan.memory_mb
        if limit is not None and memory > limit:
            return f"it used {memory:,} MB of memory; orchestrator.rollout.processes.worker_memory_mb = {limit}"
        if num_threads > MOST_THREADS:
            return f"it had {num_threads:,} threads; at most {MOST_THREADS:,}"
        return f"it had {num_files:,} open files; at most {MOST_FILES:,}" if num_files > MOST_FILES else None

    def _how_it_ended(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        if self._frames.broken is not None:
            return f"it sent unreadable data: {self._frames.broken}"
        if code is None:
            return "it cannot be ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"

    def _end(self, why: str) -> None:
        self._why = why
        asked: list[asyncio.Future[Any]] = [self._ready, *self._episodes_running.values()]
        for waiting in asked:
            if not waiting.done():
                waiting.set_exception(WorkerLost(why))
        if not self._ready.cancelled():
            self._ready.exception()  # marks it as retrieved: nothing waits for it if `start` was cancelled

    def _last_words(self) -> str:
        try:
            with self._plan.log.open("rb") as log:
                log.seek(max(0, self._plan.log.stat().st_size - 2000))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return f"; the last lines of {self._plan.log}:\n    " + "\n    ".join(lines[-8:]) if lines else ""

    # ---- messages of the process

    def _received(self, what: str, *parts: Any) -> None:
        methods: dict[str, Callable[..., None]] = {
            "ready": self._is_ready, "refused": self._refused, "ended": self._ended, "unread": self._unread,
            "broke": self._broke, "ask": self._ask, "leave": self._leave,
        }  # fmt: skip
        methods[what](*parts)

    def _is_ready(self, pid: int) -> None:
        if not self._ready.done():
            self._ready.set_result(pid)

    def _refused(self, message: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(UsageError(message))

    def _ended(self, number: int, packed: bytes) -> None:
        if (answer := self._episodes_running.get(number)) is not None and not answer.done():
            answer.set_result(packed)

    def _unread(self, number: int, why: str) -> None:
        self._raise(number, CannotBeSent(why))

    def _broke(self, number: int, kind: str, message: str) -> None:
        """Handle an error outside the environment. Errors of this package are raised in the episode.

        Any other error ends the process: the environment may have damaged the interpreter, and a fault of this package
        appears again in the next process.
        """
        if kind:
            self._raise(number, getattr(errors, kind)(message))
            return
        self._why = f"its code failed outside the environment: {message}"
        self.kill()

    def _raise(self, number: int, error: Exception) -> None:
        if (answer := self._episodes_running.get(number)) is not None and not answer.done():
            answer.set_exception(error)

    def _ask(self, number: int, method: str, *given: Any) -> None:
        assert method in ("generate", "prompt_logprobs")
        task = asyncio.create_task(self._answer(number, method, given), name=f"{method}-{number}")
        self._asking[number] = task
        task.add_done_callback(lambda _: self._asking.pop(number))

    async def _answer(self, number: int, method: str, given: tuple[Any, ...]) -> None:
        try:
            value = await getattr(self._sampler, method)(*given)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            value = nothing_sampled()  # the engine is closing
        except (SamplerFault, RecordError) as fault:
            # Drawn tokens are counted here; the worker does not need the number.
            self._frames.send("fail", number, type(fault).__name__, str(fault))
            return
        except Exception as error:  # noqa: BLE001  (a fault of this package: it ends the run, as it does locally)
            for answer in self._episodes_running.values():
                if not answer.done():
                    answer.set_exception(error)
            return
        self._frames.send("answer", number, value)

    def _leave(self, number: int) -> None:
        if number in self._asking:
            self._asking[number].cancel()


_ONE_THREAD: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""As on Ray: many workers with a thread for every core would slow each other down."""


def _kill_group(leader: int) -> None:
    """Kill the process and its children, except those in groups of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
