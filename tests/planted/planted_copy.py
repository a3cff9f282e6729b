"""Plants one fault in a copy of the package, and has a server run tests against it (planted_server.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from waiting import HANGS

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("planted_server.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one file, and the tests that are to find it."""

    name: str
    """What is wrong then; unique."""
    file: str
    """Below `src/verbatim`."""
    old: str
    """Stands in the file exactly once."""
    new: str
    """Is put in its place."""
    harm: str
    """What a user would suffer from it."""
    tests: tuple[str, ...]
    """Files or folders below `tests`; at most 60 s together on a quiet machine, and most take one."""

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        found = text.count(self.old)
        assert found == 1, (
            f"the row {self.name!r} is stale: its old text stands {found} times in {self.file}, expected once. Write "
            "the same fault for the code of today"
        )
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of some tests."""

    passed: int
    failed: tuple[str, ...] = ()
    """Tests that ran and failed; the first of them ends the run, where it is not to go on to the end."""
    broken: tuple[str, ...] = ()
    """What could not be collected or set up, or how the process ended that ran no test to its end."""
    loaded: bool
    """Whether the package was imported from the copy and from nowhere else, the file with the fault included."""
    cpu: float
    """Seconds of processor time, those of child processes included."""
    said: str
    """The end of the output."""

    @property
    def is_clean(self) -> bool:
        """Whether there are tests, and all of them passed."""
        return self.passed > 0 and not self.failed and not self.broken and self.loaded

    @property
    def found(self) -> bool:
        """Whether a test failed. What cannot be imported, or hangs, is no failed test."""
        return bool(self.failed) and self.loaded


class PlantedCopy:
    """A copy of `src/verbatim`, and the server; one request at a time.

    Args:
        place: An empty folder.
        root: The folder with `src` and `tests`.
    """

    def __init__(self, place: Path, root: Path = ROOT) -> None:
        self._root, self._place, self._count = root, place, 0
        self.package = place / "src" / "verbatim"
        half_written = shutil.ignore_patterns("*.pyc.*")  # Python renames it when it is whole
        shutil.copytree(root / "src" / "verbatim", self.package, ignore=half_written)  # with its bytecode
        self._clean: dict[tuple[str, ...], Outcome] = {}
        self._running: int | None = None
        """The process that runs tests now."""
        path = os.pathsep.join(filter(None, [str(self.package.parent), os.environ.get("PYTHONPATH", "")]))
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={
                **env,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )

    def clean(self, tests: Sequence[str]) -> Outcome:
        """The outcome of these tests without a fault; a list is run once."""
        key = tuple(tests)
        if key not in self._clean:
            self._clean[key] = self._run(None, tests)
        return self._clean[key]

    def planted(self, fault: Fault) -> Outcome:
        """The outcome of the fault's tests with the fault in place."""
        with self._holding(fault):
            return self._run(fault.file, fault.tests)

    def found_by(self, fault: Fault, expression: str, seconds: float) -> list[str]:
        """All tests with these markers that fail with the fault in place, and pass without it."""
        with self._holding(fault):
            outcome = self._run(fault.file, ["."], "-m", expression, seconds=seconds, to_the_end=True)
        assert outcome.passed, outcome.said
        return [test for test in outcome.failed if self.clean([test.removeprefix("tests/")]).is_clean]

    @contextlib.contextmanager
    def _holding(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault within, and is whole again afterwards."""
        path = self.package / fault.file
        text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime_ns
        path.write_text(fault.planted(text), encoding="utf-8")
        os.utime(path, ns=(written, written + 10**9))  # never taken for the file that the bytecode was made of
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(written, written))

    def close(self) -> None:
        """End the server, and what still runs where the campaign was interrupted."""
        if self._running is not None:
            _kill_group(self._running)
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def _run(
        self, file: str | None, tests: Sequence[str], *options: str, seconds: float = HANGS, to_the_end: bool = False
    ) -> Outcome:
        self._count += 1
        out, result, temporary = (self._place / f"{self._count:03d}.{kind}" for kind in ("out", "json", "tmp"))
        request = {
            "arguments": [*(str(self._root / "tests" / test) for test in tests), *options],
            "root": str(self._root),
            "package": str(self.package),
            "file": file,
            "out": str(out),
            "result": str(result),
            "temporary": str(temporary),
            "to_the_end": to_the_end,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self._running = self._answer()
        timer = threading.Timer(seconds, _kill_group, [self._running])
        timer.start()
        try:
            status = self._answer()
        finally:
            timer.cancel()
        self._running = None
        shutil.rmtree(temporary, ignore_errors=True)
        said = out.read_text(errors="replace")[-1500:]
        if not result.exists():
            return Outcome(passed=0, broken=(f"ended with {status}",), loaded=False, cpu=0.0, said=said)
        found = json.loads(result.read_text())
        return Outcome(**{**found, "failed": tuple(found["failed"]), "broken": tuple(found["broken"])}, said=said)

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
