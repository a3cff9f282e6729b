"""One process of a program: started, told its example, listened to, and ended with all that it has started."""

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
"""Seconds for the sandbox and the shell in it; many may start at a time on few cores."""
SCORE_SECONDS = 60.0
"""Most seconds for the scoring command."""
VARIABLE = "VERBATIM_PROGRAM_ID"
"""The environment variable that marks the processes of one program: what they start inherits it."""
_MOST_ROUNDS = 100
_TAIL = 64 * 2**10
"""Bytes kept of each output: the last ones."""

# Brings up the loopback device of a sandbox's network and listens there: a socket belongs to the network that it was
# made in, whichever process holds it. It is handed over through the descriptor that is given.
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
    """How a program ended."""

    status: int | None
    """Its exit status, 128 + n after signal n; None: its process was gone before it could be told."""
    stdout: str
    """The end of what it wrote."""
    stderr: str
    score: str = ""
    """The end of what the scoring command wrote."""
    ended_at_mb: int | None = None
    """MiB that its processes held more than, together, for which it was ended."""

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself, with status 0, and none of its processes was ended for its memory."""
        return self.status == 0 and self.ended_at_mb is None

    def told(self) -> str:
        """For an error: the exit status, and the last words."""
        how = "its process is gone" if self.status is None else f"exit status {self.status}"
        if self.ended_at_mb is not None:
            how = f"more than {self.ended_at_mb} MiB held by its processes together (memory_mb)"
        return f"{how}; {self.words()}"

    def words(self) -> str:
        """For an error: the last words."""
        said = self.stderr.strip() or self.stdout.strip()
        return f"it said {said[-600:]!r}" if said else "it said nothing"


class ProgramProcess:
    """A program that runs. Close it.

    Args:
        launch: How it is started.
        service: The gateway.
        on_line: Called with each line of its output, for a program that answers line by line.
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
        """Where the program reaches the gateway."""
        self.started = time.monotonic()
        """When the program was started, by the clock of `time.monotonic`."""

    async def start(self, key: str = "") -> None:
        """Start the process and its sandbox; the program itself begins with `go`.

        Args:
            key: Of its session, for the environment variables.

        Raises:
            EnvironmentFault: it does not start.
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
        """Let the program begin."""
        assert self._process is not None
        self._watch(self._process.pid)
        self.started = time.monotonic()
        await self.send(b"go\n")

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Write to its standard input; nothing happens if it does not read any more."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()
            if last:
                self._process.stdin.close()

    async def ended(self) -> ProgramEnd:
        """Wait for the end of the program."""
        await self._done.wait()
        return self.outcome()

    async def scored(self, seconds: float = SCORE_SECONDS) -> ProgramEnd:
        """Wait for the end of the scoring command, once the program has ended. What the program has started is killed
        before, so that nothing else can write a score.

        Raises:
            EnvironmentFault: it takes longer than this many seconds.
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
        """Run the scoring command in a process of its own, with an output that no other process has."""
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
        """How it ended, or what it has written so far."""
        if any(watched.was_ended for watched in self._watched):  # by the kernel, before anybody looked
            self._ended_at_mb = self._launch.limits.memory_mb
        text = [bytes(part).decode(errors="replace") for part in (self._stdout, self._stderr, self._score)]
        return ProgramEnd(
            status=self._status, stdout=text[0], stderr=text[1], score=text[2], ended_at_mb=self._ended_at_mb
        )

    def _watch(self, pid: int) -> None:
        """End the processes where they hold too much memory together."""
        most = self._launch.limits.memory_mb

        def end() -> None:  # in the thread that looks at memory
            self._ended_at_mb = most
            kill_group(pid)
            if not self._launch.is_inside:
                kill_marked(self._marked)

        files = self._launch.limits.disk_mb if self._launch.is_inside else 0
        self._watched.append(WATCH.add(pid, most, end, files_mb=files))

    async def close(self) -> None:
        """Kill the program and what it has started, daemons too, and delete its files. May be called again."""
        for watched in self._watched:
            WATCH.remove(watched)
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            if not self._launch.is_inside:  # a sandbox ends with its first process
                await asyncio.to_thread(kill_marked, self._marked)
            await cancel_all(self._reading)
            await gone(process)
        if self._door is not None:
            door, self._door = self._door, None
            self._service.close_door(door)
        if self._folder is not None:
            self._folder.cleanup()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Sort the output: before the mark of the end it is the program's, then that of the scoring command."""
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
                    self._score.clear()  # what is behind the last mark counts: the program knows how to write others
                    self._done.set()
            start = pending.rfind(b"\0")  # a mark may be cut in two
            keep = start if start >= 0 and len(pending) - start < 64 else len(pending)
            self._take(pending[:keep])
            pending = pending[keep:]
        self._take(pending)
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
    """A socket that listens in the network of a sandbox.

    Raises:
        EnvironmentFault: the network cannot be entered.
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
    """The first child of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return None
    return children[0] if children else None


def kill_marked(mark: str, proc: Path = Path("/proc")) -> int:
    """Kill every process that began with this mark in its environment, also in sessions of their own, until there is
    none: they may start others meanwhile. Returns how many were killed.

    Linux only; elsewhere there is nothing to read, and nothing is killed. A process that began with another environment
    is not found.
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
    except OSError:  # it has ended, or is another user's
        return False
