"""`verbatim sft FILE`: runs only the supervised part of a run, the [warm_start] table."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from verbatim.checkpoints import RunFolder
from verbatim.cli import exit_status
from verbatim.config import load_config
from verbatim.errors import ConfigError
from verbatim.plain_console import PlainConsole
from verbatim.run.check import check_run
from verbatim.run.tables import component_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a TOML file with a [warm_start] table")


def run(args: argparse.Namespace) -> int:
    """Train on conversations and say where the model is.

    Raises:
        ConfigError: the file has no [warm_start].
    """
    config = load_config(args.file, args.overrides, component_tables())
    if config.warm_start is None:
        raise ConfigError(f"{args.file} has no [warm_start] table, which says what `verbatim sft` does; for example\n"
                          '[warm_start]\nsteps = 100\ndata = "conversations.jsonl"')  # fmt: skip
    environments = check_run(config, starts_both=False)
    console = PlainConsole()
    with RunFolder.create(config, name=f"{config.named(args.file.stem).name}-sft", now=datetime.now()) as folder:
        from verbatim.run.prepare import prepare_model

        model = prepare_model(config, environments, folder.path, console)
        folder.link_latest()
        console.print(f"trained model  {model}", soft_wrap=True)
    return exit_status.FINISHED
