"""`verbatim ...` that is struck at a chosen moment, or recorded, in processes forked from one that has imported
everything and has read a configuration: a tiny run takes about a second of the processor.

    python struck.py        the server: a request a line on standard input, two answers a line on standard output

`tests/warm.py` serves commands as they are; here what they do is watched from their first line on. A command whose
trainer is a process of its own gets it from a fork too, made before the command begins, and watched as well.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import pkgutil
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

TESTS = Path(__file__).parents[1]
T, R = TypeVar("T"), TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    """Negative: ended by that signal."""
    said: str
    """On both standard streams, by all of its processes."""
    hung: bool
    """Whether it was killed because it did not end."""


class Server:
    """One server: one command at a time."""

    def __init__(self) -> None:
        import warm  # not in the server, which is forked by one

        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        self._process = warm.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
        )

    def run(
        self,
        arguments: Sequence[object],
        *,
        place: Path,
        out: Path,
        strike: Mapping[str, Any] | None = None,
        trace: Path | None = None,
        two: bool = False,
        meanwhile: Callable[[int], object] | None = None,
    ) -> Ended:
        """Type `verbatim` with the arguments in a folder.

        Args:
            arguments: Those.
            place: The folder.
            out: Where everything goes that is printed.
            strike: What happens to it (`strikes.py`).
            trace: Where the changes of `place` are recorded (`recorder.py`).
            two: Whether it may start a trainer in a process of its own.
            meanwhile: Is given the process id.
        """
        from waiting import HANGS

        request = {
            "arguments": [*map(str, arguments)],
            "place": str(place),
            "out": str(out),
            "strike": strike,
            "trace": None if trace is None else str(trace),
            "two": two,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = self._answer()
        hung = threading.Event()

        def end() -> None:
            hung.set()
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(HANGS, end)
        timer.start()
        try:
            if meanwhile is not None:
                meanwhile(pid)
            status = self._answer()
        finally:
            timer.cancel()
        return Ended(status=status, said=out.read_text(errors="replace"), hung=hung.is_set())

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def servers(count: int) -> Iterator[Callable[[Callable[[Server, T], R], Sequence[T]], list[R]]]:
    """A `map` that gives each case a server, as many cases at a time as there are servers."""
    free: queue.SimpleQueue[Server] = queue.SimpleQueue()
    everyone = [Server() for _ in range(count)]
    for server in everyone:
        free.put(server)

    def each(case: Callable[[Server, T], R], cases: Sequence[T]) -> list[R]:
        def one(item: T) -> R:
            server = free.get()
            try:
                return case(server, item)
            finally:
                free.put(server)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, cases))

    try:
        yield each
    finally:
        for server in everyone:
            server.close()


# ---- the server


def serve() -> None:
    """Until standard input ends. Only the children come back from here."""
    _import_everything()
    answers = os.dup(1)
    for line in sys.stdin:
        request = json.loads(line)
        _read_configuration_once(request["place"])
        child = os.fork()
        if child == 0:
            os.close(answers)
            become(request)
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _import_everything() -> None:
    import renderers

    import verbatim

    modules = [
        "faults.strikes",
        "faults.recorder",
        "httpx",
        "pandas",  # pyarrow imports it to write outcomes
        "safetensors.torch",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
    ]
    modules += [each.name for each in pkgutil.iter_modules(renderers.__path__, "renderers.")]
    modules += [
        each.name
        for each in pkgutil.walk_packages(verbatim.__path__, "verbatim.")
        if not each.name.endswith("__main__") and not each.name.startswith("verbatim.rollouts.gateway")
    ]
    for module in modules:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module)


_read: set[str] = set()


def _read_configuration_once(place: str) -> None:
    """`verbatim config`, so that the schema is made, and the modules of the folder are not kept."""
    if place in _read or not Path(place, "run.toml").exists():
        return
    _read.add(place)
    from verbatim.cli.main import main

    path, modules = list(sys.path), set(sys.modules)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        main(["config", str(Path(place, "run.toml"))])
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(place):
            del sys.modules[name]
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()


def become(request: dict[str, Any]) -> NoReturn:
    """The command of the request, in this process."""
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _streams(out, out)
    os.chdir(request["place"])
    sys.path.insert(0, request["place"])
    from verbatim.logs.monitors import learning_curve
    from verbatim.run import trainer_process

    strike, trace = request["strike"], request["trace"]
    if trace is None:
        learning_curve.is_installed = lambda package: False  # a picture costs as much as the rest of the run
    sys.dont_write_bytecode = True
    gc.set_threshold(0)  # to look through all that was imported costs as much, too
    address = f"\0verbatim-recorder-{os.getpid()}"  # of no file, whose name may be too long
    if request["two"]:
        spare = Spare(strike, None if trace is None else (address, request["place"]))
        trainer_process.start = spare.start  # type: ignore[assignment]
    finish = None
    if trace is not None:
        from faults import recorder

        finish = recorder.record(Path(request["place"]), Path(trace), address)
    _run(request["arguments"], strike, "orchestrator", finish)


def _run(
    arguments: Sequence[str], strike: Mapping[str, Any] | None, role: str, finish: Callable[[], None] | None = None
) -> NoReturn:
    from verbatim.cli.main import program
    from verbatim.core import spare

    spare.allow = lambda: None  # a trainer of its own is a copy that is watched, `Spare` below
    if strike is not None and "plant" in strike:
        exec(strike["plant"], {})
    if strike is not None and strike.get("role") == role:
        from faults.strikes import Strikes

        Strikes(dict(strike)).install()
    sys.argv = ["verbatim", *arguments]
    status = 1
    try:
        program()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001  Python would show it
        sys.excepthook(type(error), error, error.__traceback__)
    if finish is not None:
        finish()
    end_process(status)


def end_process(status: int) -> NoReturn:
    """As Python ends, but for taking everything down that was imported, which costs more than a tiny run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _streams(out: int, err: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115  for the whole process


class Spare:
    """A process that waits to become the trainer of the one that made it, and ends with it where none is needed."""

    def __init__(self, strike: Mapping[str, Any] | None, told: tuple[str, str] | None) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            with open(reader) as orders:
                line = orders.readline()
            if not line:
                os._exit(0)
            order = json.loads(line)
            os.setsid()
            _streams(1, os.open(order["errors"], os.O_WRONLY | os.O_APPEND))
            if told is not None:
                from faults.recorder import tell

                tell(*told)
            _run(order["arguments"], strike, "trainer")
        os.close(reader)
        self.returncode: int | None = None

    def start(self, arguments: Sequence[str], *, stderr: Any, **options: Any) -> Spare:
        """As `children.start`, of `python -m verbatim.cli trainer ...`."""
        assert list(arguments[1:3]) == ["-m", "verbatim.cli"], arguments
        order = {"arguments": list(arguments[3:]), "errors": os.path.abspath(stderr.name)}
        os.write(self._writer, (json.dumps(order) + "\n").encode())
        return self

    def poll(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
            time.sleep(0.01)
        return status


if __name__ == "__main__":
    serve()
