"""The program that `warm` starts: it imports everything, and forks what it is asked for.

    python warm_server.py FD ROOM      FD: a socket to the process that asks; ROOM: space for longer arguments

A request is its length in eight bytes, with the file descriptors of the new process, and JSON; the answer is the
process id. What is forked has a server of its own, for what it starts itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import warm

_MODULES = (
    "numpy",
    "httpx",
    "safetensors.torch",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pandas",  # pyarrow imports it to write outcomes
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
)
"""Imported by the server, beside all of Verbatim but what `_LEFT_OUT` says."""
_LEFT_OUT = ("__main__", "verbatim.rollouts.gateway.verifiers")
"""The second costs three seconds, for which most workers have no use."""


def main() -> NoReturn:
    """Serve until the other side closes; only what is forked comes here with something to run."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    warm.at_start.update(os.environ)
    sys.path.pop(0)
    import_everything()
    given = os.environ.get("PYTHONPATH", "")
    del sys.path[: len(given.split(os.pathsep)) if given else 0]  # each process has its own
    request = serve(connection)
    while True:
        try:
            become(request)
            end(0)
        except _Asked as asked:
            request = asked.request
        except SystemExit as error:
            if not isinstance(error.code, int):
                raise  # Python prints it
            end(error.code)
        except BaseException as error:
            _leave_out_this_file(error)
            raise


def end(status: int) -> NoReturn:
    """As Python does at its end, but the modules are not taken apart, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect(2 if gc.get_freeze_count() else 1)  # a run of Verbatim has collected, and unfrozen what was imported
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(status)  # Python tries again, complains, and ends with 120
    os._exit(status & 0xFF)


def _leave_out_this_file(error: BaseException) -> None:
    """The traceback that Python is going to show begins where that of a new process does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    shows = sys.excepthook
    sys.excepthook = lambda kind, error, _: shows(kind, error.with_traceback(trace), trace)


def import_everything() -> None:
    """What commands import, then or later; and what depends on these modules alone, and is worked out once."""
    import renderers

    import verbatim

    found = [
        module.name
        for package in (renderers, verbatim)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(_LEFT_OUT) and not module.name.startswith(_LEFT_OUT)
    ]
    for name in (*_MODULES, *found):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from verbatim.config.backends import schema_with_backends
    from verbatim.run.tables import component_tables

    path = list(sys.path)
    schema_with_backends({}, component_tables())
    sys.path[:] = path  # the current folder of a command will be another one
    get_checkpoint_conversion_mapping("qwen3")
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()


def serve(connection: socket.socket) -> dict[str, Any]:
    """The request that this process was forked for, with its file descriptors in `request["received"]`."""
    while True:
        header, fds, *_ = socket.recv_fds(connection, 8, 64)
        if not header:
            os._exit(0)
        request: dict[str, Any] = json.loads(warm.read(connection, int.from_bytes(header, "big")))
        request["received"] = fds
        (gate, opened), (said, says) = os.pipe(), os.pipe()
        between = _fork()
        if between == 0:
            if (child := _fork()) != 0:
                os.write(says, child.to_bytes(8, "big"))
                os._exit(0)  # the child is given to the process that asked
            connection.close()
            os.close(opened)
            os.read(gate, 1)
            return request
        answer = os.read(said, 8)
        os.waitpid(between, 0)
        for fd in (gate, opened, said, says, *fds):
            os.close(fd)
        connection.sendall(answer)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those are of pyarrow, which knows of forks
        return os.fork()


def become(request: Mapping[str, Any]) -> None:
    """Run what was asked for, in this process."""
    take_place(request)
    warm.server = _serve_this_process()
    for module in list(sys.modules.values()):  # also where it was imported by its name
        if module is not warm and getattr(module, "__dict__", {}).get("Popen") is warm.NewProcess:
            module.Popen = warm.CommandPopen  # type: ignore[attr-defined]
    run(request["args"])


def take_place(request: Mapping[str, Any]) -> None:
    """This process becomes, in all but what it runs, the one that was asked for."""
    if request["session"]:
        os.setsid()
    else:
        with contextlib.suppress(OSError):  # the group may have ended
            os.setpgid(0, request["group"])
    _take_over(request["received"], request["fds"])
    for number, usual in warm.HANDLERS.items():
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    os.sched_setaffinity(0, request["cores"])
    for each, limits in request["limits"]:
        resource.setrlimit(each, limits)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.keys().isdisjoint({"LC_ALL", "LC_CTYPE", "LANG"}):
        os.environ["LC_CTYPE"] = "C.UTF-8"  # as Python does (PEP 538)
    time.tzset()
    unbuffered = request["args"][1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = _open_stream(name, mode, unbuffered and mode == "w")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()


def _take_over(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Only those that were received are open, and have the wanted numbers."""
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(wanted) + 1) for fd in received]
    for fd, number in zip(aside, wanted, strict=True):
        os.dup2(fd, number)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in wanted:
            with contextlib.suppress(OSError):
                os.close(fd)


def _open_stream(name: str, mode: str, unbuffered: bool) -> Any:
    """As Python opens it at its start."""
    before = getattr(sys, name)
    fd = ("stdin", "stdout", "stderr").index(name)
    buffer: Any = open(fd, f"{mode}b", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    getattr(buffer, "raw", buffer).name = f"<{name}>"
    stream = io.TextIOWrapper(
        buffer,
        encoding=before.encoding,
        errors=before.errors,
        write_through=unbuffered,
        line_buffering=not unbuffered and (name == "stderr" or buffer.isatty()),
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _serve_this_process() -> warm.Server:
    """A server for what this process starts: forked while nothing has run in it."""
    ours, theirs = socket.socketpair()
    parent = _fork()
    if parent != 0:
        theirs.close()
        with ours:  # out of the way of what a new process opens first
            return warm.Server(socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 200)))
    ours.close()
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in (null, theirs.fileno()):
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd in range(3):
        os.dup2(null, fd)
    raise _Asked(serve(theirs))


class _Asked(BaseException):
    """Unwinds the stack of a server in what it has forked."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.request = request


def _show_arguments(args: Sequence[str]) -> None:
    """Write them where `ps` reads those of the server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc_pid_stat(5)
    text = b"\0".join(map(os.fsencode, args))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(args: Sequence[str]) -> None:
    """As `python ARGS`."""
    sys.orig_argv = list(args)
    _show_arguments(args)
    main = types.ModuleType("__main__")
    if "__annotations__" in vars(sys.modules["__main__"]):  # it depends on Python's version
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [os.path.abspath(each) for each in given.split(os.pathsep)] if given else []
    what, *words = warm.script(args)
    match what:
        case "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = ["-m", *words[1:]]
            sys.modules.pop(words[0], None)
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
            return
        case "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *words[1:]]
            code = compile(words[0], "<string>", "exec")
        case file:
            sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
            sys.argv = [what, *words]
            main.__file__ = os.path.abspath(file)
            code = compile(Path(file).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    main()
