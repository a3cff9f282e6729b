"""Runs tests, each request in a process that is forked from this one.

    python planted_server.py      a request a line on standard input; a process id and its status on standard output

This process has imported torch, transformers and what else tests need, and nothing of the package under test. So
whatever file of the package has a fault, a run costs what its tests cost, and not seven seconds of imports.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

MODULES = ("pytest", "pytest_asyncio", "hypothesis.strategies", "numpy", "torch", "torch.utils.checkpoint",
           "safetensors.torch", "pydantic", "transformers.models.qwen3.modeling_qwen3",
           "transformers.models.llama.modeling_llama", "httpx", "aiohttp.web", "openai", "anthropic")  # fmt: skip


def serve() -> None:
    """Until standard input ends."""
    for name in MODULES:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "verbatim"]
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    answers = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            become(json.loads(line))
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Run the tests of the request in this process, and end it."""
    os.setsid()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, stream in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, stream)
    if request["file"] is not None:  # a file with a fault leaves no bytecode
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import pytest

    seen, root = Seen(to_the_end=request["to_the_end"]), request["root"]
    pytest.main(
        [
            *request["arguments"],
            f"--rootdir={root}",
            "-c",
            f"{root}/pyproject.toml",
            "-p",
            "no:cacheprovider",
            f"--basetemp={request['temporary']}",
        ],
        plugins=[seen],
    )
    result = {
        "passed": seen.passed,
        "failed": seen.failed,
        "broken": seen.broken,
        "cpu": sum(os.times()[:4]),
        "loaded": _loaded(Path(request["package"]), request["file"]),
    }
    sys.stdout.flush()
    Path(request["result"]).write_text(json.dumps(result))
    os._exit(0)


def _loaded(package: Path, file: str | None) -> bool:
    found = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "verbatim" and getattr(module, "__file__", None)
    }
    wanted = package / (file or "__init__.py")
    return str(wanted) in found and all(Path(path).is_relative_to(package) for path in found)


class Seen:
    """A plugin of pytest that notes what it reports, and ends the run with the first failed test unless it is to go on
    to the end."""

    def __init__(self, *, to_the_end: bool) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.broken: list[str] = []
        self._session: Any = None
        self._to_the_end = to_the_end

    def pytest_sessionstart(self, session: Any) -> None:
        """Remember what to stop."""
        self._session = session

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is no test that fails."""
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Neither is a test that cannot be set up."""
        if report.failed and report.when == "setup":
            self.broken.append(report.nodeid)
        elif report.failed:
            self.failed.append(report.nodeid)
            self._session.shouldstop = False if self._to_the_end else "a test failed"
        else:
            self.passed += report.when == "call" and report.passed


if __name__ == "__main__":
    serve()
