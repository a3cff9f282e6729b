"""`verbatim rl FILE`: trains a model by reinforcement learning."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT
from verbatim.cli.own_stdout import own_stdout
from verbatim.cli.patience import told_if_slow
from verbatim.config import RunConfig, load_config
from verbatim.config.recipe_files import recipes
from verbatim.core.ctrl_c import two_presses
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.logs.checkpoints import CONFIG, load_stored_config
from verbatim.logs.monitors.json_lines import JsonLines
from verbatim.rollouts.main_loop import run_main
from verbatim.run.execute import execute
from verbatim.run.fork import Fork, find_fork, load_forked
from verbatim.run.logs import log_to_console
from verbatim.run.recipes import about, run_file
from verbatim.run.tables import component_tables
from verbatim.run.trainer_process import keep_trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --resume, --fork, --fresh, --replay, --trajectory-strategy, --quiet and --json."""
    add_shared_arguments(parser, file="?")
    add_output_arguments(parser)
    parser.add_argument(
        "--fork",
        metavar="RUN[@STEP]",
        help="begin a new run at a checkpoint of another one, with its logs and changed keys; STEP is "
        "a step, best or latest; without FILE, with that run's configuration",
    )
    parser.add_argument(
        "--fresh",
        action="append",
        default=[],
        metavar="PART",
        help="with --fork: reset the optimizer, or the examples (their order, the pools, groups "
        "in flight); may be given twice",
    )
    parser.add_argument(
        "--replay",
        type=COUNT,
        metavar="STEP",
        help="train one step of the run in --run-dir again from the stored data, without a sampler, and "
        "compare; options that are keys change them in that step; nothing is written",
    )


def add_shared_arguments(parser: argparse.ArgumentParser, *, file: str | None = None) -> None:
    """Declare FILE, --resume and --trajectory-strategy, also for `verbatim orchestrator` and `verbatim trainer`."""
    parser.add_argument(
        "file", type=run_file, nargs=file, metavar="FILE", help="the run's TOML file, or a recipe's name"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        type=lambda text: text == "latest" or Path(text),
        metavar="FOLDER",
        help="continue a run: the latest one of this file, or the one in FOLDER",
    )
    add_strategy(parser)


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """Declare --trajectory-strategy, a short form of an override (`verbatim.cli.main.parse` expands it)."""
    parser.add_argument(
        "--trajectory-strategy", metavar="NAME", help="the same as --orchestrator.trajectory-strategy NAME"
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --quiet and --json, also for `verbatim orchestrator`."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--quiet", action="store_true", help="print only warnings and errors, on standard error")
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per line for each step, evaluation, alarm, and the end; everything else "
        "goes to standard error",
    )


def _replay(args: argparse.Namespace) -> int:
    """Run --replay, which takes no options except --run-dir, --json and keys."""
    from verbatim.cli.replay import run_replay

    given = [
        name
        for name, value in (
            ("FILE", args.file),
            ("--resume", args.resume),
            ("--fork", args.fork),
            ("--fresh", args.fresh),
        )
        if value
    ]
    if given:
        raise UsageError(f"--replay takes the configuration that the run has stored; leave out {', '.join(given)}")
    if args.quiet:
        raise UsageError("--replay prints a comparison; leave out --quiet")
    log_to_console(PlainConsole(stderr=True))
    return run_replay(args.replay, args.overrides, prints_json=args.json)


def load(args: argparse.Namespace, fork: Fork | None = None) -> RunConfig:
    """Load the configuration; for a fork without FILE, load the configuration of the forked run.

    Raises:
        UsageError: FILE is missing.
    """
    if args.file is None:
        if fork is None:
            raise UsageError(
                "FILE is missing: the TOML file of the run, or a recipe's name; `verbatim recipes` lists those"
            )
        return load_forked(fork, args.overrides)
    return load_stored_config(args.file, lambda file: load_config(file, args.overrides, component_tables()))


def run(args: argparse.Namespace) -> int:
    """Train. Returns 0 if all steps were taken; 130 after Ctrl-C, with a message on how to continue. With --replay,
    returns 1 if the replayed step differs from the stored step.

    Raises:
        NothingTrained: the run finished without training on a single token.
        UsageError: options exclude each other.
    """
    if args.replay is not None:
        return _replay(args)
    return train(args, lambda folder: shlex.join(["verbatim", "rl", str(folder / CONFIG), "--resume", str(folder)]))


def train(
    args: argparse.Namespace,
    again: Callable[[Path], str],
    *,
    trainer_elsewhere: bool = False,
) -> int:
    """Do the training of `verbatim rl` and `verbatim orchestrator`. `again` returns the command that resumes the run in
    a folder."""
    is_plain = not (args.quiet or args.json)
    console = PlainConsole(quiet=not is_plain)
    notes = console if is_plain else PlainConsole(stderr=True)
    log_to_console(notes, logging.WARNING if args.quiet else logging.INFO)
    folders: list[Path] = []

    def how_to_go_on(folder: Path) -> str:
        folders[:] = [folder]
        return f"not finished; to continue:  {again(folder)}"

    fork, is_finished = _fork(args), False
    config = load(args, fork)
    if args.file in recipes().values() and not args.resume:
        console.print(f"{args.file.stem}: {about(args.file)}", soft_wrap=True)
    if not trainer_elsewhere and config.cluster is None:
        importing = told_if_slow("importing PyTorch and transformers")
        keep_trainer(config, contextlib.nullcontext() if args.quiet else importing)
    with own_stdout() if args.json else contextlib.nullcontext(sys.stdout) as stdout:
        try:
            training = execute(
                config,
                name=args.file.stem if args.file is not None else "fork",
                resume=args.resume,
                console=console,
                run_loop=lambda work, ask, to_go_on: run_main(
                    work, two_presses(ask, lambda: to_go_on), ends_without_memory=True
                ),
                how_to_go_on=how_to_go_on,
                monitors=[JsonLines(stdout)] if args.json else [],
                trainer_elsewhere=trainer_elsewhere,
                fork=fork,
            )
            is_finished = training.finished
        finally:
            if not is_plain and not is_finished and folders and (folders[0] / CONFIG).exists():
                notes.print(how_to_go_on(folders[0]), soft_wrap=True)  # `execute` printed it to a silent console
    return exit_status.FINISHED if is_finished else exit_status.INTERRUPTED


def _fork(args: argparse.Namespace) -> Fork | None:
    """The fork that --fork describes, if any. `verbatim orchestrator` does not have this option."""
    text = getattr(args, "fork", None)
    if text is None:
        if getattr(args, "fresh", None):
            raise UsageError(f"--fresh {args.fresh[0]} is for --fork RUN[@STEP]")
        return None
    if args.resume:
        raise UsageError("--fork begins a new run, and --resume continues one; give one of them")
    return find_fork(text, args.fresh)
