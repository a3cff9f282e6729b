"""`verbatim eval FILE`: measures a model on the environments of a configuration."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.cli.interrupts import two_presses
from verbatim.config import load_config
from verbatim.errors import ConfigError, RunStopped
from verbatim.models.catalog import folder_of
from verbatim.monitors.console import eval_line
from verbatim.plain_console import PlainConsole
from verbatim.rollouts.main_loop import run_main
from verbatim.run.evaluation import evaluate_model
from verbatim.run.logs import log_to_console
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --model and --out."""
    parser.add_argument("file", type=run_file, metavar="FILE", help="the run's TOML file, or a recipe's name")
    parser.add_argument("--model", metavar="FOLDER", help="the model to measure, instead of the file's model.name")
    parser.add_argument("--out", type=Path, metavar="JSONL", help="write every trajectory there")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print one line and one JSON object for each environment.

    Raises:
        ConfigError: there is no model to measure.
        RunStopped: every episode of an environment failed.
    """
    log_to_console(PlainConsole(stderr=True), logging.WARNING)
    config = load_config(args.file, args.overrides, component_tables())
    model = args.model or config.model.name
    if model is None:
        raise ConfigError(f"{args.file} builds its model when it is trained; name a trained one: --model "
                          f"runs/{args.file.stem}/latest/final")  # fmt: skip
    model = folder_of(model)
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out} exists; name another file, or remove it")
    results = run_main(evaluate_model(config, model, args.out), two_presses(), ends_without_memory=True)
    console = PlainConsole()
    for env, metrics in results.items():
        console.print(eval_line(0, env, metrics).replace("after step 0", model), soft_wrap=True)
    console.print_json(json.dumps(results))
    failed = [env for env, metrics in results.items() if metrics["failed"] == metrics["episodes"]]
    if failed:
        raise RunStopped(f"every episode failed in {', '.join(failed)}: nothing was measured")
    return exit_status.FINISHED
