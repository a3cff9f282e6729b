"""`verbatim sft FILE`: runs only the supervised part of a run, the [warm_start] table."""

from __future__ import annotations

import argparse
from datetime import datetime

from verbatim.cli import exit_status
from verbatim.config import load_config
from verbatim.core.ctrl_c import ignore_presses
from verbatim.core.errors import ConfigError
from verbatim.core.plain_console import PlainConsole
from verbatim.logs.checkpoints import ORCHESTRATOR, RunFolder, holding
from verbatim.logs.monitors.live import LiveView
from verbatim.run.check import check_run
from verbatim.run.precision import TRAINER, resolve_dtypes, tell
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables
from verbatim.run.trainer_ranks import follow_leader, is_led, open_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE."""
    parser.add_argument("file", type=run_file, metavar="FILE", help="a TOML file with a [warm_start] table")


def run(args: argparse.Namespace) -> int:
    """Train on conversations, and print where the model is.

    Raises:
        ConfigError: the file has no [warm_start] table.
    """
    if is_led():  # this is a rank other than 0: rank 0 has the run folder and leads
        ignore_presses()  # Ctrl-C reaches all ranks; rank 0 alone handles it, and ends the run in order
        follow_leader()
        return exit_status.FINISHED
    config = load_config(args.file, args.overrides, component_tables())
    if config.warm_start is None:
        raise ConfigError(
            f"{args.file} has no [warm_start] table, which configures `verbatim sft`; for example\n"
            '[warm_start]\nsteps = 100\ndata = "conversations.jsonl"'
        )
    console = PlainConsole()
    with holding(config, ORCHESTRATOR, resume=False) as held:
        with LiveView(console).stage("checking"):
            environments = check_run(config, starts_both=False, plays=False)
        config, choices = resolve_dtypes(config, keys=(TRAINER,))  # there is no sampler
        name = f"{config.named(args.file.stem).name}-sft"
        opened = RunFolder.create(config, name=name, now=datetime.now(), held=held)
    with opened as folder:
        tell(choices, console, folder.path)
        from verbatim.run.prepare import prepare_model

        with open_ranks(config, folder.path / "logs", may_be_launched=True) as ranks:
            model = prepare_model(config, environments, folder.path, console, ranks=ranks)
        folder.link_latest()
        console.print(f"trained model  {model}", soft_wrap=True)
    return exit_status.FINISHED
