"""Runs a model's commands in a bash shell: in a temporary directory, without network, with resource limits.

Commands are written to the shell's input. Marks with a random token separate the outputs of the commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from verbatim.core.children import kill_group, start_async
from verbatim.core.errors import EnvironmentFault, UsageError
from verbatim.environments.tools.group_memory import WATCH, WatchedProcess
from verbatim.environments.tools.isolation import ENVIRONMENT, Isolation, SandboxLimits, find_isolation, ulimits

START_SECONDS = 60.0
"""Timeout in seconds for starting a sandbox. It is long because many sandboxes may start at a time on few cores."""
GRACE_SECONDS = 5.0
"""Time limit, in seconds, for killing the processes in a sandbox."""
MOST_OUTPUT = 1 << 20
"""Number of bytes of output after which a command is stopped. The model is shown at most
`SandboxLimits.output_bytes` of them."""

_FRESH = "a fresh shell has started, files are kept"


# Process 1 of the namespace. It starts the shell that reads commands. It starts a new shell when the old one ends, or
# when SIGTERM has killed everything but process 1; each time it reports the status of the previous shell. The SIGTERM
# handler is set only in process 1 of a namespace: elsewhere, `kill -1` would reach every process of the user. The
# highest oom_score_adj makes the kernel kill these processes first if the machine runs out of memory. SIGXFSZ is
# ignored, so that a file over the size limit is an error of the command instead of killing it.
_KEEPER = """
exec 3<&0 4>&1 </dev/null
{stop}
{ulimits} || exit
echo 1000 >/proc/$$/oom_score_adj || exit
trap '' XFSZ
exec >/dev/null 2>&1
status=0
while printf '\\0{token} ready %s\\0' $status >&4; do
  bash --noprofile --norc <&3 >&4 2>&4 3<&- &
  wait $!
  status=$?
  wait
done
"""
_STOP = "(( $$ == 1 )) || exit; trap 'while kill -KILL -1; do :; done' TERM"


@dataclass(frozen=True, kw_only=True)
class ShellOutput:
    """What the shell wrote up to and including one of its marks."""

    output: bytes
    """The bytes before the mark."""
    to: int | Literal["ready"]
    """The number of the command that has finished, or "ready" if the first shell, or a new shell, is ready for
    commands."""
    status: int
    """Exit status of the command, or of the previous shell if `to` is "ready"."""


class ShellProtocol:
    """Writes the commands for one shell and reads its marks. Ordinary output does not look like a mark by accident; a
    command that forges marks harms only its own episode.

    Example: after `eval 'echo a' ...; printf ...` was sent as command 1, the shell has written
    `a\\n\\0sandbox-d2b7c4f1a09e3356 1 0\\0`, which is read as `ShellOutput(output=b"a\\n", to=1, status=0)`.
    """

    def __init__(self) -> None:
        self._token = f"sandbox-{secrets.token_hex(8)}"  # a digit after \\0 would be part of the escape
        self._mark = re.compile(rb"\0%s (\d{1,9}|ready) (\d{1,3})\0" % self._token.encode())
        self.received = bytearray()
        """The shell's output since the last complete `ShellOutput`."""

    def init_script(self, limits: SandboxLimits, *, has_namespaces: bool) -> str:
        """Return the script that sets the limits and keeps a shell running that reads commands from its standard
        input."""
        return _KEEPER.format(
            token=self._token,
            stop=_STOP if has_namespaces else "",
            # Outside a user namespace, the limit on processes would count all processes of the user.
            ulimits=ulimits(
                limits, "cpu_seconds", "memory_mb", "disk_mb", "open_files", *(("processes",) if has_namespaces else ())
            ),
        )

    def line(self, command: str, number: int) -> bytes:
        """Return the bytes to send for one command. The command runs in `eval`, so that a stray `break` or `return` has
        no effect. Its processes have access neither to later commands (stdin) nor to file descriptor 4, to which the
        marks are written."""
        quoted = shlex.quote(command.replace("\0", ""))
        done = f"builtin printf '\\0{self._token} {number} %s\\0' $? >&4"
        return f"eval {quoted} </dev/null 4>&-; {done}\n".encode(errors="replace")

    def answer(self) -> ShellOutput | None:
        """Remove the next complete `ShellOutput` from `received` and return it; None if `received` has no complete one
        yet."""
        found = self._mark.search(self.received)
        if found is None:
            return None
        answer = ShellOutput(
            output=bytes(self.received[: found.start()]),
            to="ready" if found[1] == b"ready" else int(found[1]),
            status=int(found[2]),
        )
        del self.received[: found.end()]
        return answer


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of one command.

    Example: `false` gives `output=""`, `status=1` and the text "[exit status 1]".
    """

    output: str
    """Stdout and stderr together, up to `SandboxLimits.output_bytes`."""
    status: int | None
    """Exit status, or None if the command was stopped."""
    notes: tuple[str, ...] = ()
    """Notes to the model, about limits that were exceeded and about restarts."""

    @property
    def text(self) -> str:
        """The text for the model: the output, then the notes in brackets. If the command failed without any output, the
        text has its exit status."""
        notes = self.notes or ((f"exit status {self.status}",) if self.status and not self.output else ())
        lines = [self.output.removesuffix("\n")] if self.output else []
        return "\n".join([*lines, *(f"[{note}]" for note in notes)])


class Sandbox:
    """One bash shell, for use in one event loop. Its working directory and variables persist between commands.

    A command's standard input is empty. A command that takes too long or writes too much is killed together with all
    processes in the sandbox; then a new shell starts with the same files. Processes in the sandbox are not trusted.
    """

    def __init__(self, limits: SandboxLimits, isolation: Isolation) -> None:
        self.limits = limits
        self.isolation = isolation
        self._protocol = ShellProtocol()
        self._num_commands = 0
        self._one_at_a_time = asyncio.Lock()
        self._process: Process | None = None
        self._init: int | None = None
        self._watched: WatchedProcess | None = None
        self._deadline: asyncio.Timeout | None = None
        self._holds_too_much = False
        self._stopping: asyncio.Task[None] | None = None
        self._notes: tuple[str, ...] = ()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    async def start(
        cls,
        limits: SandboxLimits | None = None,
        files: Mapping[str, str] | None = None,
        isolation: Isolation | None = None,
    ) -> Sandbox:
        """Start a shell in a new directory.

        Args:
            limits: Resource limits; None for the defaults.
            files: Files to write into the directory: content by relative path.
            isolation: The way to isolate the shell; None for the strongest way that works on this machine.

        Raises:
            UsageError: no way of isolation works, or a path leads out of the directory.
            EnvironmentFault: the sandbox does not start, or the files are too large for it.
        """
        sandbox = cls(limits or SandboxLimits(), isolation or find_isolation())
        try:
            await sandbox._spawn()
            if files:
                written = await sandbox.run(_write(files))
                if written.status != 0:
                    raise EnvironmentFault(f"sandbox: its files cannot be written: {written.text[:200]}")
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def run(self, command: str) -> CommandResult:
        """Run one command, which may have several lines. Raises EnvironmentFault if the sandbox has ended."""
        async with self._one_at_a_time:
            try:
                return await self._run(command)
            except asyncio.CancelledError:
                self._kill()  # the command may still run, so the shell's state is unknown
                raise
            except ConnectionError as error:
                raise EnvironmentFault("the sandbox has ended") from error

    async def close(self) -> None:
        """Kill all processes in the sandbox and delete its files. May be called more than once."""
        WATCH.remove(self._watched)
        if self._stopping is not None:
            self._stopping.cancel()
        self._kill()
        process, init, folder = self._process, self._init, self._folder
        self._process = self._init = self._folder = None
        try:
            if process is not None:
                await _reap(process)
        finally:
            if init is not None:
                os.close(init)
            if folder is not None:
                folder.cleanup()

    async def _spawn(self) -> None:
        if not self.isolation.has_namespaces and self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="verbatim-sandbox-", ignore_cleanup_errors=True)
        home = {} if self._folder is None else {"HOME": self._folder.name}
        init = self._protocol.init_script(self.limits, has_namespaces=self.isolation.has_namespaces)
        self._process = await start_async(
            self.isolation.command(self.limits, init),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            environment={**ENVIRONMENT, **home},
            folder=home.get("HOME", "/"),
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._answer("ready")
        except (TimeoutError, EnvironmentFault) as error:
            said = bytes(self._protocol.received).decode(errors="replace").strip()[:200]
            raise EnvironmentFault(f"sandbox: {self.isolation.name} did not start; it printed {said!r}") from error
        if self.isolation.has_namespaces:
            self._init = _open_child(self._process.pid)
        self._watch()

    def _watch(self) -> None:
        """Start to watch the total memory of the processes in the sandbox. Called again after each restart, because a
        watch fires only once."""
        assert self._process is not None
        loop = asyncio.get_running_loop()

        def on_too_much() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._stop_too_much)

        WATCH.remove(self._watched)
        self._holds_too_much = False
        self._watched = WATCH.add(self._process.pid, self.limits.memory_mb, on_too_much, files_mb=self.limits.disk_mb)

    def _stop_too_much(self) -> None:
        """Stop the running command. If no command is running, stop the background processes that earlier commands
        left."""
        self._holds_too_much = True
        if self._deadline is not None and not self._deadline.expired():  # `_run` then sees a timeout
            self._deadline.reschedule(0)
        elif self._process is not None:
            self._stopping = asyncio.create_task(self._stop_left(), name="sandbox-memory")

    async def _stop_left(self) -> None:
        async with self._one_at_a_time:
            if self._holds_too_much:
                with contextlib.suppress(EnvironmentFault):  # the sandbox has ended; the next command reports it
                    self._notes = (await self._stop(self._why_too_much())).notes

    def _why_too_much(self) -> str:
        return f"its processes held more than {self.limits.memory_mb} MiB together"

    async def _run(self, command: str) -> CommandResult:
        process = self._running()
        assert process.stdin is not None
        self._num_commands += 1
        number = self._num_commands
        try:
            async with asyncio.timeout(self.limits.timeout) as self._deadline:
                process.stdin.write(self._protocol.line(command, number))
                await process.stdin.drain()
                answer = await self._answer(number, most=max(MOST_OUTPUT, self.limits.output_bytes))
        except TimeoutError:
            took = f"it took more than {self.limits.timeout:g} s"
            return await self._stop(self._why_too_much() if self._holds_too_much else took)
        except _TooMuch:
            return await self._stop(f"it wrote more than {MOST_OUTPUT >> 20} MiB")
        finally:
            self._deadline = None
        notes = (f"the shell has ended; {_FRESH}",) if answer.to == "ready" else ()
        return self._result(answer.output, answer.status, *notes)

    async def _answer(self, to: int | str, most: int | None = None) -> ShellOutput:
        """Read output up to the mark of command `to`, or up to the mark of a new shell. Raises `_TooMuch` if the output
        is longer than `most` bytes."""
        process = self._running()
        assert process.stdout is not None
        while True:
            while answer := self._protocol.answer():
                if answer.to in (to, "ready"):  # answers to earlier commands, which were stopped, are skipped
                    return answer
            if most is not None and len(self._protocol.received) > most:
                raise _TooMuch
            chunk = await process.stdout.read(1 << 16)
            if not chunk:
                raise EnvironmentFault("the sandbox has ended")
            self._protocol.received += chunk

    async def _stop(self, why: str) -> CommandResult:
        """Kill all processes except process 1 of the namespace, which then starts a new shell."""
        output = bytes(self._protocol.received)
        if self._init is None:  # no namespace: start everything again
            self._kill()
            await _reap(self._running())
            self._protocol.received.clear()
            await self._spawn()
        else:
            signal.pidfd_send_signal(self._init, signal.SIGTERM)
            try:
                async with asyncio.timeout(GRACE_SECONDS):
                    await self._answer("ready")
            except TimeoutError as error:
                self._kill()
                raise EnvironmentFault("the sandbox did not recover from its last command and has ended") from error
            self._watch()
        return self._result(output, None, f"stopped: {why}; {_FRESH}")

    def _running(self) -> Process:
        if self._process is None:
            raise EnvironmentFault("the sandbox has ended")
        return self._process

    def _kill(self) -> None:
        """Kill process 1, and with it all processes of its namespace. Without a namespace, kill the process group."""
        if self._process is None or self._process.returncode is not None:
            return
        if self._init is None:
            kill_group(self._process.pid)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def _result(self, output: bytes, status: int | None, *notes: str) -> CommandResult:
        most, notes, self._notes = self.limits.output_bytes, (*self._notes, *notes), ()
        if len(output) > most:
            notes = (f"cut: these are the first {most} bytes", *notes)
        return CommandResult(output=output[:most].decode(errors="replace"), status=status, notes=notes)


class _TooMuch(Exception):
    """Raised when a command writes more than `MOST_OUTPUT` bytes."""


def _open_child(pid: int) -> int:
    """Return a pidfd of the only child of a process. A process id could be reused before a signal is sent; a pidfd
    cannot."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return os.pidfd_open(int(children.split()[0]))


async def _reap(process: Process) -> None:
    """Wait until a killed process, and all processes that share its pipe, have ended."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
    except TimeoutError as error:
        raise EnvironmentFault(f"sandbox: process {process.pid}, or one that it started, did not end") from error


def _write(files: Mapping[str, str]) -> str:
    """Return the shell command that writes the files."""
    lines = []
    for name, text in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"sandbox: file {name!r} leads out of its directory; expected a relative path")
        if len(path.parts) > 1:
            lines.append(f"mkdir -p -- {shlex.quote(str(path.parent))}")
        lines.append(f"printf %s {shlex.quote(text)} > ./{shlex.quote(str(path))}")
    return " &&\n".join(lines)
