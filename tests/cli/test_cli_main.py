"""The shell runs one command, explains mistakes without a traceback, and answers with documented statuses."""

from __future__ import annotations

import argparse
import errno
import sys
import types
from collections.abc import Callable

import pytest

from verbatim import __version__
from verbatim.cli.main import COMMANDS, main, split_overrides
from verbatim.core.errors import CheckpointNotWritten, RunStopped, UsageError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[argparse.Namespace]]:
    """Installs a command `do FILE [--resume [DIR]]` that records its arguments and then returns or raises."""

    def install(outcome: int | BaseException = 0) -> list[argparse.Namespace]:
        seen: list[argparse.Namespace] = []

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("file")
            parser.add_argument("--resume", nargs="?", const="latest")

        def run(args: argparse.Namespace) -> int:
            seen.append(args)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = types.ModuleType("fake_command")
        module.add_arguments = add_arguments  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(COMMANDS, "do", ("fake_command", "does it"))
        return seen

    return install


@pytest.mark.parametrize(
    "arguments",
    [
        ["do", "a.toml", "--resume", "--max-steps", "5", "--a.b=-1"],
        ["do", "--max-steps", "5", "a.toml", "--a.b=-1", "--resume"],
        ["do", "--max-steps", "5", "--a.b=-1", "--resume", "latest", "a.toml"],
    ],
)
def test_overrides_may_stand_anywhere(command, monkeypatch, arguments: list[str]):
    monkeypatch.setattr("verbatim.cli.main.COMMANDS_OF_A_RUN", ("do",))
    seen = command()
    assert main(arguments) == 0
    assert seen[0].file == "a.toml"
    assert seen[0].resume == "latest"
    assert seen[0].overrides == ["--max-steps", "5", "--a.b=-1"]


def test_a_command_without_keys_refuses_what_it_does_not_declare(command, capsys):
    seen = command()
    assert main(["do", "a.toml", "--resume", "--max-steps", "5"]) == 2
    assert not seen
    assert "verbatim do has no option --max-steps; see verbatim do --help" in capsys.readouterr().err


def test_options_are_never_abbreviated():
    own, overrides = split_overrides(["do", "--resum", "x"], known=["--resume"])
    assert own == ["do"]
    assert overrides == ["--resum", "x"]


def caused(error: BaseException, context: BaseException) -> BaseException:
    """The error, raised while the other one was handled."""
    error.__context__, error.__suppress_context__ = context, True
    return error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 TB")])
def test_memory_that_runs_out_is_one_message(command, capsys, error: Exception):
    command(error)
    assert main(["do", "a.toml"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("stopped: out of memory")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        (0, 0, ""),
        (7, 7, ""),
        (UsageError("found [a], expected [b]"), 2, "error: found [a], expected [b]\n"),
        (RunStopped("every rollout fails"), 1, "stopped: every rollout fails\n"),
        (KeyboardInterrupt(), 130, "interrupted: Ctrl-C\n"),
        (KeyboardInterrupt("SIGTERM"), 130, "interrupted: SIGTERM\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "stopped: No space left on device (a/b)\n"),
        (caused(UsageError("a cannot be read"), OSError(errno.EIO, "I/O error")), 1, "stopped: a cannot be read\n"),
        (caused(UsageError("there is no a"), FileNotFoundError(errno.ENOENT, "No")), 2, "error: there is no a\n"),
        (
            caused(CheckpointNotWritten("step 0: disk full"), OSError(errno.ENOSPC, "No space")),
            1,
            "stopped: step 0: disk full\n",
        ),
    ],
)
def test_each_end_has_its_status_and_one_message(command, capsys, outcome, status: int, said: str):
    command(outcome)
    assert main(["do", "a.toml"]) == status
    assert capsys.readouterr().err == said


def test_a_long_message_is_not_broken_into_lines(command, capsys):
    message = f"{'a/very/long/path/' * 20}run.toml:12: unknown key"
    command(UsageError(message))
    main(["do", "a.toml"])
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_fault_of_ours_keeps_its_traceback(command):
    command(AssertionError("the ledger does not add up"))
    with pytest.raises(AssertionError, match="ledger"):
        main(["do", "a.toml"])


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name, (_, about) in COMMANDS.items():
        assert f"\n    {name}" in printed
        assert about in printed


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"verbatim {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nothing-like-it"], ["do"]])
def test_a_wrong_command_line_is_status_2(command, capsys, arguments: list[str]):
    command()
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: verbatim" in capsys.readouterr().err
