"""Starts, watches and stops a vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verbatim.core.children import kill_group, open_log, start_async
from verbatim.core.errors import SamplerFault
from verbatim.core.machine_faults import describe
from verbatim.core.texts import end_of_file, printable
from verbatim.inference.http.client import HttpClient, HttpResponse
from verbatim.inference.vllm import subreaper
from verbatim.inference.vllm.command import server_command, server_environment
from verbatim.inference.vllm.settings import VllmSettings

logger = logging.getLogger(__name__)

_ASK_EVERY = 0.5
"""Seconds between two health checks during the start."""
_ANSWER = 5.0
"""Timeout of one health check, in seconds."""
_QUOTED = 8
"""Number of lines at the end of the log that a message quotes."""
_ERROR = re.compile(r"(?:^|\] |\) )\w*(?:Error|Exception): \S")
"""Matches the last line of a traceback, with or without a log prefix."""
_SAY_EVERY = 60.0
"""Seconds between two log lines about a server that is still starting."""


def free_port(host: str = "127.0.0.1") -> int:
    """A free port, if possible below those that Linux gives to programs that ask for any: the server binds it only
    after seconds of imports, and one of those ports may have been given to another program by then."""
    for port in (*random.SystemRandom().sample(range(20_000, 32_768), 100), 0):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind((host, port))
            return int(found.getsockname()[1])
    raise SamplerFault(f"no port of {host} can be bound")


def is_taken(host: str, port: int) -> bool:
    """True if another process listens on this address and port.

    vLLM would not fail on a taken port. Both servers would share the port, each would get some of the requests, and the
    other server might answer the health check.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as asking:
        # Ignore connections in TIME_WAIT, as the server itself does.
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


class ServerProcess:
    """One server and its descendants. All of them end when this process ends, even if this process is killed.

    Args:
        name: The server's name for messages, such as "replica 0".
        command: The command line.
        environment: The complete environment.
        port: The port that the server listens on.
        log: The file that the server's output is appended to.
        host: The address that the server listens on.
        patience: Seconds between SIGTERM and SIGKILL when the server is stopped.
        clock: Monotonic clock in seconds, for the start timeout.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        port: int,
        log: Path,
        host: str = "127.0.0.1",
        patience: float = subreaper.PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        # 0.0.0.0 cannot be connected to portably, and IPv6 addresses need brackets in a URL.
        reached = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
        self.url = f"http://{reached}:{port}"
        self._command, self._environment, self._log = command, environment, log
        self._host, self._port = host, port
        self._patience, self._clock = patience, clock
        self._log_begins = 0
        self._subreaper: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the subreaper, whose child the server is; None before the start."""
        return None if self._subreaper is None else self._subreaper.pid

    @property
    def has_ended(self) -> bool:
        """True if the server is not running, that is, was not started yet or has ended."""
        return self._subreaper is None or self._subreaper.returncode is not None

    async def ended(self) -> None:
        """Wait until the server has ended."""
        if self._subreaper is not None:
            await self._subreaper.wait()

    async def start(self, deadline: float) -> None:
        """Start the server and wait until /health succeeds.

        Args:
            deadline: Timeout in seconds.

        Raises:
            SamplerFault: another process listens on the server's port, the server ended, or it does not answer in time.
                The message quotes the end of the server's log.
        """
        if is_taken(self._host, self._port):
            raise SamplerFault(f"{self.name} cannot listen on {self._host}, port {self._port}: address already in use")
        began = self._clock()
        with open_log(self._log) as log:
            self._log_begins = log.tell()  # the log is appended to, and messages must not quote an earlier start
            self._subreaper = await start_async(
                # The pipe on stdin ties the server to this process: the subreaper ends the server when the pipe closes.
                [sys.executable, "-I", subreaper.__file__, str(self._patience), *self._command],
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                environment=self._environment,
            )
        try:
            await self._until_it_answers(began, deadline)
        except BaseException:  # cancellation too, because no server may outlive a failed start
            await self.stop()
            raise
        seconds = self._clock() - began
        logger.info("%s answers at %s after %.0f s; its log: %s", self.name, self.url, seconds, self._log)

    async def _until_it_answers(self, began: float, deadline: float) -> None:
        client = HttpClient(self.url, request_timeout=_ANSWER, max_retries=0)
        said = began
        try:
            while True:
                if self.has_ended:
                    how = self.how_it_ended()
                    raise SamplerFault(f"{self.name} ended before it answered ({how}). {self.end_of_log()}")
                with contextlib.suppress(SamplerFault):
                    if await client.ask("GET", "/health", None, _is_healthy):
                        return
                now = self._clock()
                if now - began > deadline:
                    raise SamplerFault(
                        f"{self.name} does not answer at {self.url} after {deadline:g} s "
                        f"(inference.vllm.start_timeout). {self.end_of_log()}"
                    )
                if now - said > _SAY_EVERY:
                    said = now
                    logger.info("still waiting for %s after %.0f s; its log: %s", self.name, now - began, self._log)
                await asyncio.sleep(_ASK_EVERY)
        finally:
            await client.close()

    def how_it_ended(self) -> str:
        """The server's exit status or signal, for a message."""
        if self._subreaper is None:
            return "it was not started"
        status = self._subreaper.returncode
        # The subreaper exits with 128 + N if signal N ended the server.
        return f"signal {status - 128}" if status is not None and status > 128 else f"status {status}"

    def end_of_log(self) -> str:
        """The first error that was logged since the start, and the last lines of the log, worded for a message.

        The processes of a server report each other's failures, so the first error is the cause.
        """
        try:
            written = end_of_file(self._log, since=self._log_begins)
        except OSError as error:
            return f"Its log cannot be read: {describe(error, self._log)}"
        lines = [printable(line) for line in written if line.strip()]
        first = next((n for n, line in enumerate(lines[:-_QUOTED]) if _ERROR.search(line)), None)
        cause = [] if first is None else [f"  {lines[first]}", "  ..."]
        return "\n".join([f"From {self._log}:", *cause, *(f"  {line}" for line in lines[-_QUOTED:])])

    async def stop(self) -> None:
        """End the server and its descendants, even if they hang."""
        if self._subreaper is None or self._subreaper.returncode is not None:
            return
        assert self._subreaper.stdin is not None
        self._subreaper.stdin.close()
        try:
            # The subreaper takes at most PATIENCE until SIGKILL, and PATIENCE to reap. 5 seconds are added as a margin.
            await asyncio.wait_for(self._subreaper.wait(), 2 * subreaper.PATIENCE + 5)
        except TimeoutError:  # the subreaper itself is frozen
            kill_group(self._subreaper.pid)
            await self._subreaper.wait()


def make_process(
    settings: VllmSettings,
    replica: int,
    *,
    model: str | Path,
    port: int,
    context_length: int,
    logs: Path,
    host: str = "127.0.0.1",
    num_threads: int | None = None,
    api_key: str | None = None,
    uploads: Path | None = None,
    adapter_rank: int | None = None,
    return_routed_experts: bool = False,
    return_kept_sets: bool = False,
) -> ServerProcess:
    """The process of one replica. It is not started yet.

    Takes the arguments of `server_command` and of `server_environment`, and `logs`, the folder for the process's log.
    """
    command = server_command(
        settings,
        model=model,
        port=port,
        context_length=context_length,
        host=host,
        adapter_rank=adapter_rank,
        return_routed_experts=return_routed_experts,
        return_kept_sets=return_kept_sets,
    )
    environment = server_environment(
        settings,
        replica,
        is_local_model=Path(model).is_dir(),
        num_threads=num_threads,
        api_key=api_key,
        uploads=uploads,
        needs_second_runner=return_routed_experts or return_kept_sets,
    )
    log = logs / f"replica_{replica}.log"
    return ServerProcess(f"replica {replica}", command, environment, port=port, log=log, host=host)


def _is_healthy(answer: HttpResponse) -> bool:
    return answer.status == 200
