"""One process of a program: starts it, sends the example, reads the output, and ends it with all its descendants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.children import Child, gone, kill_group, start_async
from verbatim.core.errors import EnvironmentFault
from verbatim.core.tasks import cancel_all
from verbatim.environments.tools.group_memory import WATCH, WatchedProcess
from verbatim.inference.http.acceptor import Acceptor
from verbatim.rollouts.gateway.gateway import variables
from verbatim.rollouts.gateway.program.launch import PORT, Launch
from verbatim.rollouts.gateway.service import Service

START_SECONDS = 60.0
"""Timeout in seconds for starting the sandbox and its shell. It is long because many sandboxes may start at a time on
few cores."""
SCORE_SECONDS = 60.0
"""Timeout of the scoring command in seconds."""
VARIABLE = "VERBATIM_PROGRAM_ID"
"""Environment variable that marks the processes of one program. All descendants inherit it, including daemons."""
_MOST_ROUNDS = 100
"""Maximum number of passes over all processes in `kill_marked`. Without a maximum, a fork bomb could keep the function
busy forever."""
_TAIL = 64 * 2**10
"""Number of bytes kept from the end of each output."""

# Runs inside a sandbox's network namespace: brings up the loopback device and listens there. A socket stays in the
# namespace in which it was created, no matter which process holds it. The listening socket is passed back to the
# gateway over the given descriptor. 0x8914 is SIOCSIFFLAGS, 0x41 is IFF_UP | IFF_RUNNING.
_LISTEN = """
import fcntl, socket, struct, sys
own = socket.socket(fileno=int(sys.argv[1]))
with socket.socket() as device:
    fcntl.ioctl(device, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
listening = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=1024)
socket.send_fds(own, [b"x"], [listening.fileno()])
"""


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """The way in which a program ended, and its output."""

    status: int | None
    """The exit status (128 + n if signal n ended the program), or None if the shell around the program died before it
    could report the status."""
    stdout: str
    """The end of the program's standard output."""
    stderr: str
    """The end of the program's standard error."""
    score: str = ""
    """The end of the scoring command's output."""
    ended_at_mb: int | None = None
    """The memory limit in MiB if the program was killed because its processes together exceeded this limit, else
    None."""

    @property
    def is_well(self) -> bool:
        """True if the program exited with status 0 and was not killed for its memory."""
        return self.status == 0 and self.ended_at_mb is None

    def told(self) -> str:
        """Describe the exit status and the last output, for an error message."""
        how = "its process is gone" if self.status is None else f"exit status {self.status}"
        if self.ended_at_mb is not None:
            how = f"more than {self.ended_at_mb} MiB held by its processes together (memory_mb)"
        return f"{how}; {self.words()}"

    def words(self) -> str:
        """Quote the last output, for an error message."""
        said = self.stderr.strip() or self.stdout.strip()
        return f"it said {said[-600:]!r}" if said else "it said nothing"


class ProgramProcess:
    """A running program. The caller must call `close`.

    Args:
        launch: The settings with which the program is started.
        service: The gateway's HTTP service.
        on_line: Called with each line of the program's standard output, for a program that answers line by line.
    """

    def __init__(self, launch: Launch, service: Service, on_line: Callable[[str], None] | None = None) -> None:
        self._launch, self._service, self._on_line = launch, service, on_line
        self._token = f"program-{secrets.token_hex(8)}"
        self._mark = re.compile(rb"\0%s (ready|done (\d{1,3}))\0" % self._token.encode())
        self._process: Child | None = None
        self._door: Acceptor | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._ready, self._done = asyncio.Event(), asyncio.Event()
        self._status: int | None = None
        self._stdout, self._stderr, self._score = bytearray(), bytearray(), bytearray()
        self._line = bytearray()
        self._work, self._folder = launch.work_folder()
        self._environment: dict[str, str] = {}
        self._marked = secrets.token_hex(16)
        self._watched: list[WatchedProcess] = []
        self._ended_at_mb: int | None = None
        self.url = service.url
        """The gateway's URL as the program sees it."""
        self.started = time.monotonic()
        """Start time of the program, by `time.monotonic`."""

    async def start(self, key: str = "") -> None:
        """Start the process and its sandbox. The program itself starts only when `go` is called.

        Args:
            key: The session's key, which the program finds in its environment variables.

        Raises:
            EnvironmentFault: the process or its sandbox cannot be started.
        """
        self.url = f"http://127.0.0.1:{PORT}" if self._launch.is_inside else self._service.url
        self._environment = {**self._launch.environment(variables(self.url, key), self._work), VARIABLE: self._marked}
        self._process = await self._start(self._launch.argv(self._token, self._work))
        assert self._process.stdout is not None and self._process.stderr is not None
        self._reading = [
            asyncio.create_task(self._read(self._process.stdout), name="program-stdout"),
            asyncio.create_task(self._read_errors(self._process.stderr), name="program-stderr"),
        ]
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ready.wait()
                if self._status is None and self._done.is_set():
                    raise EnvironmentFault(f"program: its sandbox did not start: {self.outcome().told()}")
                if self._launch.is_inside:
                    self._door = self._service.open_door(await _listen_inside(self._process.pid))
        except TimeoutError:
            raise EnvironmentFault(f"program: its sandbox did not start within {START_SECONDS:g} s") from None

    async def _start(self, argv: list[str]) -> Child:
        return await start_async(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, environment=self._environment, folder="/")

    async def go(self) -> None:
        """Start the program in the process that `start` has prepared."""
        assert self._process is not None
        self._watch(self._process.pid)
        self.started = time.monotonic()
        await self.send(b"go\n")

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Write to the program's standard input. Does nothing if the program has closed it. If `last` is True, the
        input is closed afterwards."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()
            if last:
                self._process.stdin.close()

    async def ended(self) -> ProgramEnd:
        """Wait until the program has ended, and return how it ended."""
        await self._done.wait()
        return self.outcome()

    async def scored(self, seconds: float = SCORE_SECONDS) -> ProgramEnd:
        """Run the scoring command after the program has ended, and wait for its end. The remaining processes of the
        program are killed first, so that only the command can write a score.

        Raises:
            EnvironmentFault: the command takes longer than `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                if self._launch.is_inside:
                    await asyncio.shield(self._reading[0])  # the last mark is the shell's: it has killed all others
                else:
                    await asyncio.to_thread(kill_marked, self._marked)
                    await self._score_outside()
        except TimeoutError:
            raise EnvironmentFault(f"program: the scoring command did not end within {seconds:g} s") from None
        return self.outcome()

    async def _score_outside(self) -> None:
        """Run the scoring command in a separate process, with an output pipe that no process of the program holds."""
        process = await self._start(self._launch.score_argv(self._work))
        assert process.stdout is not None and process.stderr is not None
        errors = asyncio.create_task(self._read_errors(process.stderr), name="score-stderr")
        self._watch(process.pid)
        try:
            while chunk := await process.stdout.read(1 << 16):
                self._score += chunk
                del self._score[:-_TAIL]
        finally:
            kill_group(process.pid)
            errors.cancel()
            await gone(process)

    def outcome(self) -> ProgramEnd:
        """Return how the program ended or, if it is still running, its output so far."""
        if any(watched.was_ended for watched in self._watched):  # the kernel killed it before `WATCH` checked
            self._ended_at_mb = self._launch.limits.memory_mb
        text = [bytes(part).decode(errors="replace") for part in (self._stdout, self._stderr, self._score)]
        return ProgramEnd(
            status=self._status, stdout=text[0], stderr=text[1], score=text[2], ended_at_mb=self._ended_at_mb
        )

    def _watch(self, pid: int) -> None:
        """Watch the memory of the processes, and kill them if together they exceed the limit."""
        most = self._launch.limits.memory_mb

        def end() -> None:  # called on the thread that checks memory
            self._ended_at_mb = most
            kill_group(pid)
            if not self._launch.is_inside:
                kill_marked(self._marked)

        files = self._launch.limits.disk_mb if self._launch.is_inside else 0
        self._watched.append(WATCH.add(pid, most, end, files_mb=files))

    async def close(self) -> None:
        """Kill the program and all its descendants, including daemons, and delete its files. May be called more than
        once."""
        for watched in self._watched:
            WATCH.remove(watched)
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            if not self._launch.is_inside:  # in a sandbox, all processes end with the first one
                await asyncio.to_thread(kill_marked, self._marked)
            await cancel_all(self._reading)
            await gone(process)
        if self._door is not None:
            door, self._door = self._door, None
            self._service.close_door(door)
        if self._folder is not None:
            self._folder.cleanup()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Split the output: what precedes the "done" mark is the program's, what follows it is the scoring
        command's."""
        pending = b""
        while chunk := await stream.read(1 << 16):
            pending += chunk
            while found := self._mark.search(pending):
                self._take(pending[: found.start()])
                pending = pending[found.end() :]
                if found[2] is None:
                    self._ready.set()
                else:
                    self._status = int(found[2])
                    # Only output after the last mark counts. The program may read the token from the command line and
                    # print a forged mark, but the mark of the shell comes after it.
                    self._score.clear()
                    self._done.set()
            start = pending.rfind(b"\0")  # a mark may be split over two reads; no mark is as long as 64 bytes
            keep = start if start >= 0 and len(pending) - start < 64 else len(pending)
            self._take(pending[:keep])
            pending = pending[keep:]
        self._take(pending)
        # The output has ended. Wake all waiting tasks, even if the process died before it had written its marks.
        self._done.set()
        self._ready.set()

    def _take(self, data: bytes) -> None:
        kept = self._stdout if self._status is None else self._score
        kept += data
        del kept[:-_TAIL]
        if self._on_line is None or self._status is not None:
            return
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self._line = bytearray(rest[-_TAIL:])
        for line in lines:
            self._on_line(line.decode(errors="replace"))

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(1 << 16):
            self._stderr += chunk
            del self._stderr[:-_TAIL]


async def _listen_inside(pid: int) -> socket.socket:
    """Create a socket that listens in the network namespace of a sandbox.

    Raises:
        EnvironmentFault: the namespace cannot be entered.
    """
    inside = _child(pid)
    if inside is None:
        raise EnvironmentFault("program: its sandbox has ended")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        python = (sys.executable, "-I", "-S", "-c", _LISTEN, str(theirs.fileno()), str(PORT))
        entering = await start_async(
            ["nsenter", "--target", inside, "--net", *user, "--", *python],
            stdout=PIPE,
            stderr=PIPE,
            descriptors=[theirs.fileno()],
        )
        _, said = await entering.communicate()
        if entering.returncode:
            raise EnvironmentFault(
                f"program: the network of its sandbox cannot be entered: {said.decode(errors='replace').strip()[-300:]}"
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    listening = socket.socket(fileno=descriptors[0])
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _child(pid: int) -> str | None:
    """Return the id of the first child of a process, or None."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return None
    return children[0] if children else None


def kill_marked(mark: str, proc: Path = Path("/proc")) -> int:
    """Kill every process that has this mark in its initial environment, in any session. Repeat this until no such
    process is left, because these processes may start new processes in the meantime. Return the number of killed
    processes.

    Linux only: without /proc nothing is killed. Processes that were started with a different environment are not
    found.
    """
    sought, killed = f"{VARIABLE}={mark}".encode(), set[int]()
    for _ in range(_MOST_ROUNDS):
        found = [pid for pid in _processes(proc) if _has(proc / str(pid) / "environ", sought)]
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    return len(killed)


def _processes(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdigit() and int(name) != os.getpid()]
    except OSError:
        return []


def _has(environ: Path, sought: bytes) -> bool:
    try:
        return sought in environ.read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return False
