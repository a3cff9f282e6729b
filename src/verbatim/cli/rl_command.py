"""`verbatim rl FILE`: trains a model by reinforcement learning."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from verbatim.checkpoints import CONFIG, load_stored_config
from verbatim.cli import exit_status
from verbatim.cli.interrupts import two_presses
from verbatim.config import RunConfig, load_config
from verbatim.plain_console import PlainConsole
from verbatim.rollouts.main_loop import run_main
from verbatim.run.execute import execute
from verbatim.run.logs import log_to_console
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables
from verbatim.transport.mirror.server import Listen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --resume and --trajectory-strategy."""
    parser.add_argument("file", type=run_file, metavar="FILE", help="the run's TOML file, or a recipe's name")
    parser.add_argument("--resume", nargs="?", const=True, default=False, type=_folder, metavar="FOLDER",
                        help="continue a run: the latest one of this file, or the one in FOLDER")  # fmt: skip
    parser.add_argument("--trajectory-strategy", metavar="NAME",
                        help="the same as --orchestrator.trajectory-strategy NAME")  # fmt: skip


def _folder(text: str) -> bool | Path:
    return text == "latest" or Path(text)


def load(args: argparse.Namespace) -> RunConfig:
    """The configuration of the arguments."""
    overrides = args.overrides
    if args.trajectory_strategy is not None:
        overrides = [*overrides, "--orchestrator.trajectory-strategy", args.trajectory_strategy]
    return load_stored_config(args.file, lambda file: load_config(file, overrides, component_tables()))


def run(args: argparse.Namespace) -> int:
    """Train. 0 when all steps were taken, 130 when Ctrl-C ended it; then it says how to go on.

    Raises:
        NothingTrained: the run came to its end and learned from no token.
    """
    return train(args, lambda folder: shlex.join(["verbatim", "rl", str(folder / CONFIG), "--resume", str(folder)]))


def train(
    args: argparse.Namespace, again: Callable[[Path], str], *, trainer_elsewhere: bool = False,
    listen: Listen | None = None,
) -> int:  # fmt: skip
    """`run`, also for `verbatim orchestrator`. `again` is what to type to continue the run in a folder."""
    console = PlainConsole()
    log_to_console(console)
    training = execute(
        load(args),
        name=args.file.stem,
        resume=args.resume,
        console=console,
        run_loop=lambda work, ask, to_go_on: run_main(
            work, two_presses(ask, lambda: to_go_on), ends_without_memory=True
        ),
        how_to_go_on=lambda folder: f"not finished; to go on:  {again(folder)}",
        trainer_elsewhere=trainer_elsewhere,
        listen=listen,
    )
    return exit_status.FINISHED if training.finished else exit_status.INTERRUPTED
