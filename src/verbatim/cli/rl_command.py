"""`verbatim rl FILE`: trains a model by reinforcement learning."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from verbatim.checkpoints import load_stored_config
from verbatim.cli import exit_status
from verbatim.cli.interrupts import two_presses
from verbatim.config import load_config
from verbatim.plain_console import PlainConsole
from verbatim.rollouts.main_loop import run_main
from verbatim.rollouts.program_loop import Ask
from verbatim.run.execute import execute
from verbatim.run.logs import log_to_console
from verbatim.run.tables import component_tables

RESUME_LATEST = "latest"

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE and --resume."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=RESUME_LATEST,
        metavar="FOLDER",
        help="continue a run: the latest one of this file, or the one in FOLDER",
    )


def run(args: argparse.Namespace, *, trainer_elsewhere: bool = False) -> int:
    """Train. 0 when all steps were taken, 130 when Ctrl-C ended it; then it says how to go on.

    Raises:
        NothingTrained: the run came to its end and learned from no token.
    """
    console = PlainConsole()
    log_to_console(console)
    config = load_stored_config(args.file, lambda file: load_config(file, args.overrides, component_tables()))
    commands = ("trainer", "orchestrator") if trainer_elsewhere else ("rl",)

    def how_to_go_on(folder: Path) -> str:
        again = " & ".join(
            shlex.join(["verbatim", command, str(folder / "config.toml"), "--resume", str(folder)])
            for command in commands
        )
        return f"not finished; to go on:  {again}"

    outcome = execute(
        config,
        name=args.file.stem,
        resume=args.resume is not None if args.resume in (None, RESUME_LATEST) else Path(args.resume),
        console=console,
        run_loop=_run_loop,
        how_to_go_on=how_to_go_on,
        trainer_elsewhere=trainer_elsewhere,
    )
    return exit_status.FINISHED if outcome.finished else exit_status.INTERRUPTED


def _run_loop(work: Coroutine[Any, Any, T], ask: Ask, how_to_go_on: str, /) -> T:
    return run_main(work, two_presses(ask, lambda: how_to_go_on), ends_without_memory=True)
