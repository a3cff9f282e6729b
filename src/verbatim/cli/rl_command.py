"""`verbatim rl FILE`: train a model by reinforcement learning."""

from __future__ import annotations

import argparse
import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from verbatim.checkpoints import ORCHESTRATOR, RunFolder, load_stored_config
from verbatim.cli import exit_status
from verbatim.cli.interrupts import two_presses
from verbatim.errors import NothingTrained, UsageError
from verbatim.machine_faults import is_machine_fault
from verbatim.plain_console import PlainConsole
from verbatim.run.check import check_run
from verbatim.run.logs import log_to_console, log_to_file
from verbatim.run.parts import make_monitors
from verbatim.run.tables import component_tables
from verbatim.run.training_run import TrainingRun

RESUME_LATEST = "latest"


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
    started = time.monotonic()
    console = PlainConsole()
    log_to_console(console)
    config = load_stored_config(args.file, args.overrides, component_tables())
    environments = check_run(config)
    monitors = make_monitors(config)
    name = config.name or args.file.stem
    config = config.model_copy(update={"name": name})  # stored with the run, which may be resumed from its own file
    if args.resume is not None:
        where = None if args.resume == RESUME_LATEST else Path(args.resume)
        folder = RunFolder.resume(config, name=name, folder=where)
    elif trainer_elsewhere:
        folder = RunFolder.join(config, role=ORCHESTRATOR)
    else:
        folder = RunFolder.create(config, name=name, now=datetime.now())
    with folder, log_to_file(folder.log(ORCHESTRATOR)):
        console.print(f"run folder  {folder.path}", soft_wrap=True)
        how_to_go_on = _how_to_go_on(folder.path, trainer_elsewhere=trainer_elsewhere)
        training = TrainingRun(config, environments, monitors, folder, console, name=name, started=started)
        finished = False
        try:
            finished = training.run(
                lambda first: two_presses(first, lambda: how_to_go_on), trainer_elsewhere=trainer_elsewhere
            )
            if finished:
                _print_summary(training.summary, name, folder, console)
        except UsageError as error:
            if not training.has_begun and not is_machine_fault(error):
                folder.withdraw()
            raise
        finally:
            if not finished and not folder.is_withdrawn:
                console.print(how_to_go_on, soft_wrap=True, style="bold")
        if training.nothing_trained is not None:
            raise NothingTrained(training.nothing_trained)
    return exit_status.FINISHED if finished else exit_status.INTERRUPTED


def _how_to_go_on(folder: Path, *, trainer_elsewhere: bool) -> str:
    commands = ("trainer", "orchestrator") if trainer_elsewhere else ("rl",)
    again = " & ".join(
        shlex.join(["verbatim", command, str(folder / "config.toml"), "--resume", str(folder)]) for command in commands
    )
    return f"not finished; to go on:  {again}"


def _print_summary(summary: dict[str, Any], name: str, folder: RunFolder, console: Console) -> None:
    table = Table(show_header=False, title=f"{name}: what it came to", title_justify="left")
    for key, value in summary.items():
        if not isinstance(value, dict):
            table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    for what, path in (
        ("trained model", folder.path / "final"),
        ("summary", folder.path / "summary.json"),
        ("learning curve", folder.learning_curve),
    ):
        if path.exists():
            console.print(f"{what:<15} {path}", soft_wrap=True)
