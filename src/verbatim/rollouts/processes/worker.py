"""A worker in a child process on this machine. Starts it, sends episodes to it over a socket, monitors it and ends
it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import verbatim
from verbatim.core.children import how_it_ended, kill_group, open_log, start_async
from verbatim.core.errors import RecordError, SamplerFault, UsageError
from verbatim.core.texts import end_of_file
from verbatim.inference.sampler import nothing_sampled
from verbatim.rollouts.draws import CountingSampler
from verbatim.rollouts.processes.rpc_connection import RpcConnection
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers import worker
from verbatim.rollouts.workers.worker import WorkerContext, WorkerLost, dumped

PATIENCE = 2.0
"""Seconds that a worker gets to exit by itself, so that it can close its environments and run `atexit` functions."""
WATCH_EVERY = 1.0
"""Seconds between two checks of the resources that a worker uses."""
MOST_FILES, MOST_THREADS = 12_000, 1_000
"""Maximum number of file descriptors, and of threads, of a worker. A worker that has more is leaking them, and is
replaced before the system runs out of them."""
MOST_LOGGED = 32 * 2**20
"""Maximum size in bytes of an environment's log. A log that has grown larger is emptied."""

# The folder of this package is added to the search path if it is missing there. The working directory is not searched
# (-P), because it may hold modules with names of the standard library. The last argument is the label that `ps` shows.
_START = (
    "import sys; _, root, fd, parent, _ = sys.argv; root in sys.path or sys.path.insert(0, root); "
    "from verbatim.rollouts.processes.child import main; main(int(fd), int(parent))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables that limit the threads of a worker, with the values that Ray sets. If every worker had one
thread per core, many workers would slow each other down."""


class ProcessWorker:
    """A `Worker` in a child process that ends together with this process, no matter why this process ends. The child
    has its own process group, so a Ctrl-C at the terminal does not reach it.

    Args:
        label: The environment's label.
        plan: The result of `packed_plan`.
        sampler: Answers the worker's requests.
        context: Working directory and search path of this process, for the worker.
        log: The file to which the worker's output is written.
        memory_mb: Maximum memory of the worker in MiB (2**20 bytes), or None for no limit.
    """

    def __init__(
        self,
        label: str,
        plan: bytes,
        sampler: CountingSampler,
        *,
        context: WorkerContext,
        log: Path,
        memory_mb: int | None,
    ) -> None:
        self._label, self._plan, self._sampler, self._context = label, plan, sampler, context
        self._log, self._memory_mb = log, memory_mb
        self._process: asyncio.subprocess.Process | None = None
        self._overseeing: asyncio.Task[None] | None = None
        self._peer = RpcConnection(
            {
                "generate": functools.partial(self._asked, sampler.generate),
                "prompt_logprobs": functools.partial(self._asked, sampler.prompt_logprobs),
                "broke": self._broke,
            }
        )
        self._why: str | None = None

    # ---- the Worker protocol

    async def start(self) -> int:
        """Start the process and create the environment in it. Return the process id."""
        what = f"a worker process of environment {self._label!r}"
        sampler = self._sampler
        facts = {
            "context_length": sampler.context_length,
            "vocab_size": sampler.vocab_size,
            "policy_version": sampler.policy_version,
        }
        try:
            await self._spawn()
            async with asyncio.timeout(worker.START_TIMEOUT):
                pid: int = await self._peer.call("begin", self._context, facts, self._plan)
        except BaseException as error:
            self.kill()
            if isinstance(error, TimeoutError):
                said = f"{what} did not start within {worker.START_TIMEOUT:.0f} s; its output is in {self._log}"
            elif isinstance(error, OSError):
                said = f"{what} cannot be started: {error}"
            elif isinstance(error, WorkerLost):
                said = f"{what} did not start: {error}{self._last_words()}"
            elif isinstance(error, UsageError):
                said = f"in {what}: {error}"
            else:
                raise
            raise UsageError(said) from error
        return pid

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run one episode, and return the packed trajectory."""
        if self._why is not None:
            raise WorkerLost(self._why)
        packed: bytes = await self._peer.call("run", label, dumped(task))
        return packed

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    async def close(self) -> None:
        """Give the process `PATIENCE` seconds to end by itself, then kill it."""
        if self._overseeing is None:
            return
        self._peer.close()
        await asyncio.wait({self._overseeing}, timeout=PATIENCE)
        self.kill()
        await asyncio.wait({self._overseeing}, timeout=PATIENCE)
        self._overseeing.cancel()  # a process that the kernel cannot end is not waited for
        await asyncio.wait({self._overseeing, *self._peer.cancel()}, timeout=PATIENCE)

    # ---- the process

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(verbatim.__file__).parents[1])
        command = (sys.executable, "-P", "-c", _START, root, str(theirs.fileno()), str(os.getpid()), self._label)
        try:
            with theirs, open_log(self._log) as log:
                self._process = await start_async(
                    command,
                    descriptors=(theirs.fileno(),),
                    stdout=log,
                    stderr=log,
                    environment={**_ONE_THREAD, **os.environ},
                )
            self._overseeing = asyncio.create_task(self._oversee(self._process), name=f"worker-{self._process.pid}")
            await asyncio.get_running_loop().create_unix_connection(lambda: self._peer, sock=ours)
        except BaseException:
            ours.close()
            self._peer.connection_lost(None)  # even if it was never connected
            raise

    async def _oversee(self, process: asyncio.subprocess.Process) -> None:
        """Monitor the process until it has ended. The episodes that it is running when it ends are lost."""
        exited, closed = asyncio.create_task(process.wait()), self._peer.closed
        either: set[asyncio.Future[Any]] = {exited, closed}
        try:
            while not (exited.done() or closed.done()):
                await asyncio.wait(either, timeout=WATCH_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if not (exited.done() or closed.done()) and (outgrown := self._outgrown(process.pid)) is not None:
                    self._why = outgrown
                    self.kill()
            # The process's exit and the end of the connection happen together, unless the process has closed the socket
            # or a child of it still holds the socket.
            await asyncio.wait(either, timeout=PATIENCE)
            self.kill()
            await exited
            kill_group(process.pid)  # its children
        finally:
            exited.cancel()
            self._peer.close()
            self._why = self._why or self._how_it_ended(process)
            self._peer.fail(WorkerLost(self._why))
            await asyncio.wait({exited})

    def _outgrown(self, pid: int) -> str | None:
        """Say in words which limit the process exceeds; None if it exceeds none, or if the system does not report what
        the process uses."""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > MOST_LOGGED:
                os.truncate(self._log, 0)
        try:
            memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 2**20
            num_threads, num_files = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, ValueError, IndexError):
            return None
        limit = self._memory_mb
        if limit is not None and memory > limit:
            return f"it used {memory:,} MB of memory; orchestrator.rollout.processes.worker_memory_mb = {limit}"
        if num_threads > MOST_THREADS:
            return f"it had {num_threads:,} threads; at most {MOST_THREADS:,}"
        return f"it had {num_files:,} open files; at most {MOST_FILES:,}" if num_files > MOST_FILES else None

    def _how_it_ended(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        if self._peer.broken is not None:
            return f"it sent unreadable data: {self._peer.broken}"
        if code is None:
            return "it could not be killed"
        return f"its process {how_it_ended(code)}"

    def _last_words(self) -> str:
        try:
            lines = end_of_file(self._log, most=2000)
        except OSError:
            return ""
        return f"; the last lines of {self._log}:\n    " + "\n    ".join(lines[-8:]) if lines else ""

    # ---- what the process calls

    async def _asked(self, method: Callable[..., Awaitable[Any]], *given: Any) -> Any:
        """Answer a call of the worker with the sampler, which counts the sampled tokens in this process, even if the
        call fails."""
        try:
            return await method(*given)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return nothing_sampled()  # the engine is closing
        except (SamplerFault, RecordError):
            raise
        except Exception as error:  # a bug in this package: it ends the run, as with local episodes
            self._peer.fail(error)
            await asyncio.shield(self._peer.closed)
            raise

    async def _broke(self, why: str) -> None:
        """Handle the worker's report that code outside the environment failed. The environment may have damaged the
        interpreter, so the process is replaced. If the cause is a bug in this package, the next process will fail
        too."""
        self._why = f"its code failed outside the environment: {why}"
        self.kill()
