"""`python -m verbatim.cli ...` in a process that is forked from one that has imported everything: less than a second
of the processor, not eight.

Each worker of pytest has one server, started when it is first needed. While tests run, `subprocess.Popen` (so also
`subprocess.run` and asyncio's processes) asks it for the commands of `COMMANDS`, and refuses one that cannot be forked;
any other program is started as usual.
`warm.Popen` and `warm.run` ask it for `python -c` and `python FILE` too, which pays for scripts that import torch.

A forked process is a child of the one that asked, and is as a new one in its arguments, folder, environment, streams,
group or session, signals, limits, random numbers and exit status; what it starts itself is forked in the same way. Not
so: modules are imported already, and not taken apart at the end; /proc/PID/environ is the server's. A test that must
see a new process starts it in `with cold("the reason"):`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("warm_server.py")
COMMANDS = (
    "verbatim.cli",
    "verbatim.run.trainer_rank",
    "verbatim.run.speed_trial",
    "verbatim.inference.http.render_pool",
)
"""What is forked wherever a test, or a command, starts it."""

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_", "MALLOC_")
"""The beginnings of variables that Python or a library reads once: the server has read them already."""
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED")

HANDLERS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Those of a new process. Others are never changed by who starts commands."""

_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)
_LINUX = sys.platform == "linux"  # elsewhere a process cannot be given to another parent
_PR_SET_CHILD_SUBREAPER = 36
NewProcess = subprocess.Popen
server: Server | None = None
at_start: dict[str, str] = {}
"""The environment of the server."""


class Popen(NewProcess):  # type: ignore[type-arg]
    """As `subprocess.Popen`, of `[sys.executable, "-m" | "-c" | FILE, ...]`, perhaps with "-u" before.

    Raises:
        ValueError: it cannot be forked: another program, or an option or a variable that Python reads at its start.
    """

    def _execute_child(self, args: Any, *given: Any) -> None:
        options = inspect.signature(NewProcess._execute_child).bind(self, args, *given).arguments  # type: ignore[attr-defined]
        if isinstance(args, Sequence) and not isinstance(args, str | bytes):
            args = [os.fsdecode(each) for each in args]
        problem = _problem(args, options)
        if problem is None:
            self._fork(args, options)
        else:
            self._cannot(problem, args, *given)

    def _cannot(self, problem: str, *given: Any) -> None:
        raise ValueError(f"{problem}; start it by subprocess, in `with cold(...)`")

    def _fork(self, args: list[str], options: Mapping[str, Any]) -> None:
        env = os.environ if options["env"] is None else options["env"]
        sys.audit("subprocess.Popen", args[0], args, options["cwd"], options["env"])
        streams = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        passed = [int(fd) for fd in options["pass_fds"]]
        request = {
            "args": args,
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            "cwd": os.path.abspath(os.fsdecode(options["cwd"] or os.getcwd())),
            "fds": [0, 1, 2, *passed],
            "parent": os.getpid(),
            "session": options["start_new_session"],
            "group": {-1: os.getpgrp()}.get(options["process_group"], options["process_group"]),
            "ignored": [number for number in HANDLERS if signal.getsignal(number) is signal.SIG_IGN],
            "cores": sorted(os.sched_getaffinity(0)),
            "limits": [[each, resource.getrlimit(each)] for each in _LIMITS],
        }
        fds = [own if fd == -1 else fd for own, fd in enumerate(streams)] + passed
        self.pid = _running().fork(request, fds)
        self._child_created = True
        self._close_pipe_fds(
            *(
                options[name]
                for name in (  # type: ignore[attr-defined]
                    "p2cread",
                    "p2cwrite",
                    "c2pread",
                    "c2pwrite",
                    "errread",
                    "errwrite",
                )
            )
        )


class CommandPopen(Popen):
    """Forks `COMMANDS`, and refuses those that cannot be forked. All else is a new process; so are commands where there
    is no Linux, and those of a process that was made by os.fork."""

    def _cannot(self, problem: str, args: Any, *given: Any) -> None:
        could = _LINUX and (server is None or server.is_ours())
        if could and isinstance(args, list) and args[0] == sys.executable:
            what, name = [*script(args), "", ""][:2]
            if what == "-m" and name in COMMANDS:
                super()._cannot(problem, args, *given)
        NewProcess._execute_child(self, args, *given)  # type: ignore[attr-defined]

    def _fork(self, args: list[str], options: Mapping[str, Any]) -> None:
        what, name = [*script(args), ""][:2]
        if what == "-m" and name in COMMANDS:
            super()._fork(args, options)
        else:
            NewProcess._execute_child(**options)  # type: ignore[attr-defined]


def run(
    args: Sequence[str | Path],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, by `Popen`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def commands() -> Iterator[None]:
    """Commands are forked meanwhile; at the end the server ends."""
    global server
    subprocess.Popen = CommandPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = NewProcess  # type: ignore[misc]
        if server is not None:
            server.close()
            server = None


@contextlib.contextmanager
def cold(reason: str) -> Iterator[None]:
    """All processes are new ones meanwhile, because of this; at most ten tests may ask for it."""
    forking, subprocess.Popen = subprocess.Popen, NewProcess  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = forking  # type: ignore[misc]


def script(args: Sequence[str]) -> Sequence[str]:
    """What is run: `["-m", "verbatim.cli", "rl", ...]`."""
    return args[2:] if args[1:2] == ["-u"] else args[1:]


def _problem(args: Any, options: Mapping[str, Any]) -> str | None:
    """Why this cannot be forked."""
    if server is not None and not server.is_ours():
        return "this process was made by os.fork"
    if not _LINUX or not isinstance(args, list) or args[0] != sys.executable or not script(args):
        return f"{args} is not this Python with a script"
    what, *words = script(args)
    if what.startswith("-") and (what not in ("-m", "-c") or not words):
        return f"{args[:2]}: only -m, -c and files are run"
    needs = {
        "executable": None,
        "preexec_fn": None,
        "shell": False,
        "close_fds": True,
        "gid": None,
        "gids": None,
        "uid": None,
        "umask": -1,
    }
    if wrong := [name for name, usual in needs.items() if options[name] != usual]:
        return f"{wrong[0]} = {options[wrong[0]]!r}"
    cwd, env = options["cwd"], os.environ if options["env"] is None else options["env"]
    if not os.path.isdir(cwd or "."):
        return f"there is no folder {cwd}"
    if not what.startswith("-") and not os.path.isfile(os.path.join(cwd or ".", what)):
        return f"there is no file {what}"
    for folder in (cwd or ".", *env.get("PYTHONPATH", "").split(os.pathsep)):
        if Path(folder, "sitecustomize.py").exists():
            return "sitecustomize.py is run at Python's start"
        other = Path(folder, "verbatim", "__init__.py")
        if other.exists() and not other.samefile(str(importlib.util.find_spec("verbatim").origin)):  # type: ignore[union-attr]
            return f"{other} is another Verbatim"
    known = at_start or os.environ
    for name, value in env.items():
        if name.startswith(_READ_AT_START) and name not in _READ_LATER and known.get(name) != value:
            return f"{name} is read at the start"
    return None


class Server:
    """Forks processes that become children of this one."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket, self._process = connection, process
        self._owner, self._lock = os.getpid(), threading.Lock()

    def is_ours(self) -> bool:
        """Whether it forks for this process."""
        return os.getpid() == self._owner

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The process id; `fds` become those of `request["fds"]`."""
        text = json.dumps(request).encode()
        unheard = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGSEGV})
        try:
            with self._lock, _adopting():
                socket.send_fds(self._socket, [len(text).to_bytes(8, "big")], fds)
                self._socket.sendall(text)
                return read_number(self._socket)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unheard)

    def close(self) -> None:
        """It ends; what it has forked goes on."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Processes below this one whose parents end become its children."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_starting = threading.Lock()


def _running() -> Server:
    global server
    with _starting:
        if server is None:
            at_start.update(os.environ)
            ours, theirs = socket.socketpair()
            with theirs:
                # A group of its own: Ctrl-C in the terminal is not for it. In this session: so are its children.
                process = NewProcess(
                    [sys.executable, str(PROGRAM), str(theirs.fileno()), "-" * 4000],
                    process_group=0,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            server = Server(ours, process)
        return server


def read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise EOFError("the server of warm processes has ended")
        found += more
    return found


def read_number(connection: socket.socket) -> int:
    return int.from_bytes(read(connection, 8), "big")
