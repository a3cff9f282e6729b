"""The shell runs one command, explains mistakes without a traceback, and answers with documented statuses."""

from __future__ import annotations

import argparse
import errno
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from verbatim import __version__
from verbatim.cli.main import COMMANDS, KEYED, main, make_parser, parse, split_overrides
from verbatim.cli.patience import told_if_slow
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
        monkeypatch.setattr("verbatim.cli.main.KEYED", (*KEYED, "do"))
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
    monkeypatch.setattr("verbatim.cli.main.KEYED", ("do",))
    seen = command()
    assert main(arguments) == 0
    assert seen[0].file == "a.toml"
    assert seen[0].resume == "latest"
    assert seen[0].overrides == ["--max-steps", "5", "--a.b=-1"]


def test_a_command_without_keys_refuses_what_it_does_not_declare(command, capsys, monkeypatch):
    seen = command()
    monkeypatch.setattr("verbatim.cli.main.KEYED", ())
    assert main(["do", "a.toml", "--resume", "--max-steps", "5"]) == 2
    assert not seen
    assert "verbatim do has no option --max-steps. There are --resume" in capsys.readouterr().err


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


def test_nothing_typed_is_answered_with_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert all(f"\n    {name}" in printed and about in printed for name, (_, about) in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_promises_keys_where_it_takes_them(name: str, capsys):
    """`rollout` takes them with --inference FILE, and says so there."""
    promises = "every key of FILE is also an option" in " ".join(make_parser(name).commands[name].format_help().split())
    assert promises == (name in KEYED)
    takes = name in (*KEYED, "rollout")
    required = {"gateway": ["check", "agent"], "env": ["check"], "recipes": ["list"], "models": ["list"]}
    typed = [name, *required.get(name, ["a"]), "--max-steps", "5"]
    if takes:
        assert parse([name, "a", *(["--out", "b"] if name == "rollout" else []), "--max-steps", "5"]).overrides == [
            "--max-steps",
            "5",
        ]
    else:
        assert main(typed) == 2
        assert "has no option --max-steps" in capsys.readouterr().err


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize("typed", [["@", "a.toml"], ["@a.toml"], ["--max-steps", "5", "@", "a.toml"], ["a.toml"]])
def test_a_file_may_stand_behind_an_at_as_in_prime_rl(name: str, typed: list[str]):
    args = parse([name, *typed])
    assert args.file == Path("a.toml")
    assert args.overrides == typed[:-2] * (typed[0] == "--max-steps")


def test_a_file_whose_name_begins_with_an_at_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "@a.toml").touch()
    assert parse(["config", "@a.toml"]).file == Path("@a.toml")


@pytest.mark.parametrize("name", ["rl", "orchestrator", "trainer", "config", "plan"])
def test_the_strategy_in_short_is_an_override(name: str):
    args = parse([name, "a.toml", "--trajectory-strategy", "branching", "--seed", "1"])
    assert args.overrides == ["--seed", "1", "--orchestrator.trajectory-strategy", "branching"]


class Clock:
    """A timer that is over at once, or never."""

    daemon = False

    def __init__(self, *, is_over: bool) -> None:
        self.is_over, self.seconds, self.cancelled = is_over, 0.0, False

    def __call__(self, seconds: float, call: Callable[[], None]) -> Clock:
        self.seconds, self.call = seconds, call
        return self

    def start(self) -> None:
        if self.is_over:
            self.call()

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        pass


@pytest.mark.parametrize("is_over", [True, False])
def test_what_takes_long_is_told_on_standard_error(capsys, is_over: bool):
    clock = Clock(is_over=is_over)
    with told_if_slow("importing torch", timer=clock):
        assert not clock.cancelled
    assert (clock.cancelled, clock.daemon, clock.seconds) == (True, True, 3.0)
    assert capsys.readouterr() == ("", "importing torch ...\n" * is_over)


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
