"""`verbatim ...` in processes that are forked from one that has imported everything already: half a second, not eight.

    python warm.py        the server: a request a line on standard input, two answers a line on standard output

A command whose trainer is a process of its own gets it from a fork too, made before the command begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

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
    """Whether it was killed because it took too long."""
    seconds: float


class Warm:
    """One server: one command at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS / "faults"), str(TESTS), *filter(None, sys.path)])
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                 "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
        )  # fmt: skip

    def run(
        self, arguments: Sequence[object], *, place: Path, out: Path, strike: Mapping[str, Any] | None = None,
        seconds: float = 60.0, meanwhile: Callable[[int], object] | None = None,
    ) -> Ended:  # fmt: skip
        """Type `verbatim` with the arguments in the folder `place`; `meanwhile` is given the process id."""
        request = {"arguments": [*map(str, arguments)], "place": str(place), "out": str(out), "strike": strike}
        began = time.monotonic()
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        pid = self._answer()
        hung = threading.Event()

        def end() -> None:
            hung.set()
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            if meanwhile is not None:
                meanwhile(pid)
            status = self._answer()
        finally:
            timer.cancel()
        said = out.read_text(errors="replace")
        return Ended(status=status, said=said, hung=hung.is_set(), seconds=time.monotonic() - began)

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@contextlib.contextmanager
def servers(count: int) -> Iterator[Callable[[Callable[[Warm, T], R], Sequence[T]], list[R]]]:
    """A `map` that gives each case a server, as many cases at a time as there are servers."""
    free: queue.SimpleQueue[Warm] = queue.SimpleQueue()
    everyone = [Warm() for _ in range(count)]
    for warm in everyone:
        free.put(warm)

    def each(case: Callable[[Warm, T], R], cases: Sequence[T]) -> list[R]:
        def one(item: T) -> R:
            warm = free.get()
            try:
                return case(warm, item)
            finally:
                free.put(warm)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, cases))

    try:
        yield each
    finally:
        for warm in everyone:
            warm.close()


# ---- the server


def serve() -> None:
    """Until standard input ends. Only the children come back from here."""
    import importlib

    for module in ("httpx", "renderers", "safetensors.torch", "strikes", "verbatim.renderers.recognise",
                   "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
                   "verbatim.cli.main", "verbatim.cli.rl_command", "verbatim.cli.trainer_command",
                   "verbatim.run.training_run",
                   "verbatim.run.trainer_process", "verbatim.inference.embedded.engine", "verbatim.inference.teacher",
                   "verbatim.models.build", "verbatim.orchestrator.loop", "verbatim.orchestrator.nothing_trained",
                   "verbatim.renderers", "verbatim.trainer.serve", "verbatim.trainer.trainer",
                   "verbatim.run.prepare"):  # fmt: skip
        importlib.import_module(module)
    from verbatim.monitors import learning_curve

    learning_curve._has_matplotlib = lambda: False  # a picture costs as much as the rest of the run
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    answers = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            become(json.loads(line))
            return
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(request: dict[str, Any]) -> None:
    """The command of the request, in this process."""
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _streams(out, out)
    os.chdir(request["place"])
    sys.path.insert(0, request["place"])
    strike = request["strike"]
    spare = Spare(strike)
    from verbatim.run import trainer_process

    trainer_process.subprocess = SimpleNamespace(
        Popen=spare.start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    _run(request["arguments"], strike, "orchestrator")


def _run(arguments: Sequence[str], strike: Mapping[str, Any] | None, role: str) -> None:
    from verbatim.cli.main import program

    if strike is not None and strike["role"] == role:
        from strikes import Strikes

        Strikes(dict(strike)).install()
    sys.argv = ["verbatim", *arguments]
    program()


def _streams(out: int, err: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115  for the whole process


class Spare:
    """A process that waits to become the trainer of the one that made it, and ends with it where none is needed."""

    def __init__(self, strike: Mapping[str, Any] | None) -> None:
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
            _run(order["arguments"], strike, "trainer")
        os.close(reader)
        self.returncode: int | None = None

    def start(self, arguments: Sequence[str], *, stderr: Any, **options: Any) -> Spare:
        """As `subprocess.Popen`, of `python -m verbatim.cli trainer ...`."""
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

    def kill(self) -> None:
        """As `subprocess.Popen.kill`."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
