"""Commands that a strike may hit, in warm processes (`tests/warm.py`); all that their processes say goes into a file.

    python warm.py STRIKE ARGUMENTS...      `verbatim ARGUMENTS`, hit by STRIKE (JSON, or null)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
    """Runs commands."""

    def run(
        self, arguments: Sequence[object], *, place: Path, out: Path, strike: Mapping[str, Any] | None = None,
        seconds: float = 60.0, meanwhile: Callable[[int], object] | None = None,
    ) -> Ended:  # fmt: skip
        """Type `verbatim` with the arguments in the folder `place`; `meanwhile` is given the process id."""
        import warm

        path = os.pathsep.join([str(place), *filter(None, sys.path)])
        began = time.monotonic()
        with out.open("ab") as said, warm.Popen(
            [sys.executable, __file__, json.dumps(strike), *map(str, arguments)], cwd=place, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
        ) as process:  # fmt: skip
            hung = threading.Event()

            def end() -> None:
                hung.set()
                process.kill()

            timer = threading.Timer(seconds, end)
            timer.start()
            try:
                if meanwhile is not None:
                    meanwhile(process.pid)
                status = process.wait()
            finally:
                timer.cancel()
        said = out.read_text(errors="replace")
        return Ended(status=status, said=said, hung=hung.is_set(), seconds=time.monotonic() - began)


@contextlib.contextmanager
def servers(count: int) -> Iterator[Callable[[Callable[[Warm, T], R], Sequence[T]], list[R]]]:
    """A `map` that runs as many cases at a time."""

    def each(case: Callable[[Warm, T], R], cases: Sequence[T]) -> list[R]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda item: case(Warm(), item), cases))

    yield each


def program(strike: Mapping[str, Any] | None, arguments: Sequence[str]) -> None:
    """The command; also that of its trainer, which is struck too."""
    from verbatim.cli.main import program
    from verbatim.monitors import learning_curve
    from verbatim.run import trainer_process

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        assert list(command[1:3]) == ["-m", "verbatim.cli"], command
        import warm

        return warm.Popen([sys.executable, __file__, json.dumps(strike), *command[3:]], **options)

    trainer_process.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    learning_curve._has_matplotlib = lambda: False  # a picture costs as much as the rest of the run
    if strike is not None and strike["role"] == ("trainer" if arguments[0] == "trainer" else "orchestrator"):
        from faults.strikes import Strikes

        Strikes(dict(strike)).install()
    sys.argv = ["verbatim", *arguments]
    program()


if __name__ == "__main__":
    program(json.loads(sys.argv[1]), sys.argv[2:])
