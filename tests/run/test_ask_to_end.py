"""The first Ctrl-C or SIGTERM ends a run after its step, also where its words reach no one."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim.run.training_run import TrainingRun


class Printing:
    """A console that keeps what is printed, or whose terminal is gone."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.lines = error, list[str]()

    def print(self, line: str, **style: Any) -> None:
        if self.error is not None:
            raise self.error
        self.lines.append(line)


def asked(console: Printing) -> tuple[bool, bool, int]:
    """Whether the run took the press, whether it knows of it, and how often its loop was asked to stop."""
    stops: list[str] = []
    loop = SimpleNamespace(call_soon_threadsafe=lambda call: call())
    run = SimpleNamespace(_stop=lambda: stops.append("stop"), console=console, was_interrupted=False)
    took = TrainingRun._ask_to_end(run, loop)  # type: ignore[arg-type]
    return took, run.was_interrupted, len(stops)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        BrokenPipeError(errno.EPIPE, "Broken"),
        ValueError("I/O operation on closed file."),
    ],
)
def test_a_terminal_that_is_gone_does_not_keep_a_run_from_ending(error: Exception):
    assert asked(Printing(error)) == (True, True, 1)


def test_it_is_said_that_the_run_ends_after_its_step():
    console = Printing()
    assert asked(console) == (True, True, 1)
    assert console.lines == ["ending after this step, with a checkpoint; Ctrl-C again ends at once"]
