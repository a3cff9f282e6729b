"""Runs the command `verbatim`: selects a command, separates its options from overrides, explains errors.

A command is a module with `add_arguments(parser)` and `run(args) -> exit status`. It is imported only if it was typed.
`args.overrides` holds the configuration overrides: `["--orchestrator.batch-size", "64", ...]`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Container, Sequence
from types import TracebackType
from typing import Any, NoReturn

from rich.text import Text

from verbatim import __version__
from verbatim.cli import exit_status
from verbatim.cli.ending import end_without_stragglers
from verbatim.core import spare
from verbatim.core.ctrl_c import ignore_presses_at_the_very_end, sigterm_is_ctrl_c
from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import NothingTrained, RunStopped, StoppedByAlarm, UsageError, VerbatimError
from verbatim.core.machine_faults import describe, is_machine_fault, is_out_of_memory
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import printable, shown

COMMANDS = {
    "init": ("verbatim.cli.init_command", "write a project: an environment, a run, a test"),
    "rl": ("verbatim.cli.rl_command", "train a model by reinforcement learning"),
    "orchestrator": (
        "verbatim.cli.orchestrator_command",
        "run everything except the trainer, which is started separately",
    ),
    "trainer": ("verbatim.cli.trainer_command", "run only the trainer of a training run"),
    "sft": ("verbatim.cli.sft_command", "train a model on conversations"),
    "eval": ("verbatim.cli.eval_command", "evaluate models on environments"),
    "compare": ("verbatim.cli.compare_command", "compare runs"),
    "env": ("verbatim.cli.env_command", "check an environment without a model, or list the bundled ones"),
    "gateway": ("verbatim.cli.gateway_command", "check an agent program without a model"),
    "recipes": ("verbatim.cli.recipes_command", "list the runs that come with the package, or copy one"),
    "models": ("verbatim.cli.models_command", "list pretrained models that need no hub, or get one"),
    "rollout": ("verbatim.cli.rollout_command", "play conversations or an environment, and store the results"),
    "serve": ("verbatim.cli.serve_command", "serve a model over HTTP: token ids or chat completions"),
    "inference": ("verbatim.cli.inference_command", "start only the inference backend, for a run on another host"),
    "export": ("verbatim.cli.export_command", "write a run's trajectories as JSON lines"),
    "view": ("verbatim.cli.view_command", "show runs as a page, or write them as an HTML file"),
    "doctor": ("verbatim.cli.doctor_command", "explain why prompts do not extend what was sampled"),
    "plan": ("verbatim.cli.plan_command", "predict whether a run fits into memory, and its step time"),
    "config": ("verbatim.cli.config_command", "print the resolved configuration, and check it"),
    "completion": ("verbatim.cli.completion_command", "print the code that enables completion in bash, zsh or fish"),
}
"""The module of each command and its description in `--help`, by name."""
KEYED = ("rl", "orchestrator", "trainer", "sft", "eval", "inference", "plan", "config")
"""Commands that accept the keys of their FILE as options."""
_REFUSE_THEMSELVES = ("gateway", "rollout")
"""Commands with their own message about unknown options."""
OVERRIDES_HELP = (
    "every key of FILE is also an option: --orchestrator.batch-size 64, --trainer.optim.lr=1e-4, "
    "--orchestrator.train.env.0.max-turns 4; null unsets a key"
)


def program() -> NoReturn:
    """The whole process of the command. It exits with the command's status, even if other threads are left."""
    gc.disable()  # off until `main` has imported the command: imports allocate a lot, and no garbage
    sys.excepthook = _show_traceback
    ignore_presses_at_the_very_end()
    sigterm_is_ctrl_c()
    raise_descriptor_limit()
    threading.excepthook = _show_end_of_thread
    sys.unraisablehook = _show_unraisable
    status = exit_status.STOPPED
    try:
        if "_ARGCOMPLETE" in os.environ:  # a shell calls this for completions
            importlib.import_module("verbatim.cli.completion").answer()
        spare.allow()
        try:
            status = main()
        except spare.Become as order:  # this is raised in the forked copy, which now runs the trainer command
            status = main(order.arguments)
    except SystemExit as end:  # from argparse
        status = end.code if isinstance(end.code, int) else exit_status.USAGE
    except KeyboardInterrupt:  # this is raised outside `main`, which handles Ctrl-C itself
        status = exit_status.INTERRUPTED
    finally:
        status = _flush(status)
        end_without_stragglers(status)
    sys.exit(status)


def _flush(status: int) -> int:
    """Flush standard output. If that fails (`> /dev/full`), print a message and return a failure status."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _complain("stopped", describe(error, "standard output"), exit_status.STOPPED)
        # Python flushes stdout again at exit, and would print a traceback; stdout now goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or exit_status.STOPPED
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    The statuses are defined in `verbatim.cli.exit_status`: 1 for a run that stopped (`RunStopped`) and for every fault
    of the machine, even if a `UsageError` was raised from it (a file that cannot be read because the disk fails); 2 for
    any other `UsageError`. Any other exception is a bug in Verbatim and passes through with its traceback.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        gc.enable()  # the imports that allocate a lot are done
        try:
            return int(args.run(args))
        except SystemExit as error:
            raise RunStopped(f"a module, an environment or a plug-in called sys.exit({shown(error.code)})") from error
    except NothingTrained as error:
        return _complain("trained nothing", str(error), exit_status.NOTHING_TRAINED)
    except StoppedByAlarm as error:
        return _complain("stopped by an alarm", str(error), exit_status.ALARM)
    except VerbatimError as error:
        if isinstance(error, UsageError) and not is_machine_fault(error):
            return _complain("error", str(error), exit_status.USAGE)
        return _complain("stopped", str(error), exit_status.STOPPED)
    except (OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        return _complain("stopped", describe(error), exit_status.STOPPED)
    except KeyboardInterrupt as error:
        return _complain("interrupted", str(error) or "Ctrl-C", exit_status.INTERRUPTED)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments, and add `run` and `overrides`.

    Raises:
        SystemExit: `--help` or `--version` was typed, or no command or an unknown command (argparse prints the
            message).
        UsageError: the command does not have this option.
    """
    typed = next((a for a in arguments if not a.startswith("-")), None)
    parser = make_parser(typed)
    rest, overrides = list(arguments), list[str]()
    if typed in COMMANDS:
        known = parser.commands[typed]._option_string_actions
        rest, overrides = split_overrides(arguments, known)
        if overrides and typed not in (*KEYED, *_REFUSE_THEMSELVES) and not {"-h", "--help"} & {*rest}:
            from verbatim.core.texts import nearest  # importing this takes a third of the time of `verbatim --help`

            there = ", ".join(option for option in known if option.startswith("--") and option != "--help")
            raise UsageError(
                f"verbatim {typed} has no option {overrides[0]}{nearest(overrides[0], known) or '.'} "
                f"There are {there or 'none'}"
            )
    elif not rest:
        parser.print_help(sys.stderr)
        raise SystemExit(exit_status.USAGE)
    args = parser.parse_args(rest)
    if getattr(args, "trajectory_strategy", None) is not None:
        overrides += ["--orchestrator.trajectory-strategy", args.trajectory_strategy]
    args.overrides = overrides
    return args


def make_parser(typed: str | None) -> CommandParser:
    """The parser of all commands. Only the module of the typed command is imported, for its arguments."""
    parser = CommandParser(prog="verbatim", description="Train LLM agents by reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"verbatim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module_name, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        parser.commands[name] = command
        if name == typed:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            if name in KEYED:
                command.epilog = "; ".join(filter(None, (OVERRIDES_HELP, command.epilog)))
    return parser


def split_overrides(arguments: Sequence[str], known: Container[str]) -> tuple[list[str], list[str]]:
    """Separate the command's own arguments from overrides, which may be anywhere among them.

    An option that the command does not know is an override, and the next word is its value, unless this word is an
    option too. An "@" before the file, as in prime-rl, is dropped.

    >>> split_overrides(["rl", "--max-steps", "5", "a.toml", "--resume"], known=["--resume"])
    (['rl', 'a.toml', '--resume'], ['--max-steps', '5'])
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "@":
            continue
        if not argument.startswith("--") or argument.partition("=")[0] in known:
            own.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--") and rest[0] != "@":
            overrides.append(rest.pop(0))
    return own, overrides


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback with control characters escaped, so that quoted text cannot send commands to the terminal."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _show_end_of_thread(args: threading.ExceptHookArgs) -> None:
    """Print the traceback of an uncaught exception in a thread, such as a thread of an environment."""
    if args.exc_type is not SystemExit:
        _show(f"thread {args.thread.name if args.thread is not None else 'unknown'} ended", args)


def _show_unraisable(args: sys.UnraisableHookArgs) -> None:
    """Print the traceback of an exception in a destructor."""
    _show(f"{args.err_msg or 'ignored'}: {shown(args.object)}", args)


def _show(where: str, args: threading.ExceptHookArgs | sys.UnraisableHookArgs) -> None:
    """Print a line that says where the exception was raised, then the traceback; if memory ran out, print a single
    line."""
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    if is_out_of_memory(error):
        sys.stderr.write(printable(f"{where}: {describe(error)}\n"))
        return
    sys.stderr.write(printable(f"{where}:\n"))
    _show_traceback(args.exc_type, error, args.exc_traceback)


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors quote the user's text with control characters escaped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: dict[str, argparse.ArgumentParser] = {}
        """The parsers of the commands, by name."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _complain(kind: str, message: str, status: int) -> int:
    """Print an error message, and return the status."""
    # This is `Text`, not markup, because messages are full of [tables]. Soft wrap keeps file:line whole for a terminal
    # to link.
    PlainConsole(stderr=True).print(Text.assemble((f"{kind}: ", "bold red"), message), soft_wrap=True)
    return status
