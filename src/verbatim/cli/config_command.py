"""`verbatim config FILE [overrides]`: checks everything that a file names, and prints the resolved configuration."""

from __future__ import annotations

import argparse
import contextlib
import sys

from verbatim.cli import exit_status
from verbatim.cli.patience import told_if_slow
from verbatim.cli.rl_command import add_strategy
from verbatim.config import dump_config, load_config
from verbatim.core.imports import imports_that_stay
from verbatim.core.texts import printable
from verbatim.models.renderers.continuations import told
from verbatim.models.renderers.renderer import Renderer
from verbatim.run.check import check_run
from verbatim.run.cluster import connected
from verbatim.run.openings import look_at_openings
from verbatim.run.orchestrator.staleness import capped_settings
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE and --trajectory-strategy."""
    parser.add_argument("file", type=run_file, metavar="FILE", help="the run's TOML file, or a recipe's name")
    add_strategy(parser)


def run(args: argparse.Namespace) -> int:
    """Print the configuration with defaults and overrides. On standard error, print which settings the staleness rule
    caps, which opening prompts leave no room for a completion, and which turns continue exactly as sampled.

    Raises:
        UsageError: the run could not start, as far as that can be checked without loading weights and querying servers.
    """
    made: list[Renderer] = []
    with told_if_slow(f"reading {args.file} and what it names"):
        config = load_config(args.file, args.overrides, component_tables())
    with contextlib.redirect_stdout(sys.stderr):  # environments may print, and stdout must be valid TOML
        with connected(config) as placed:
            pass
        with told_if_slow("checking environments, components and the model's renderer"), imports_that_stay():
            environments = check_run(config, plays=False, told=made.append)
        with told_if_slow("measuring the opening prompts of all examples"):
            looked_at = list(look_at_openings(config, environments, made[0]))
    sys.stdout.write(dump_config(config))
    sys.stdout.flush()
    for line in placed:
        print(printable(line), file=sys.stderr)
    for sentence in (*capped_settings(config.orchestrator), *looked_at):
        print(printable(f"note: {sentence}"), file=sys.stderr)
    settings = config.orchestrator.renderer
    from verbatim.models.renderers.stop_ids import ends_in_words

    for sentence in (*told(made[0], settings.thinking_retention, settings.history), ends_in_words(made[0])):
        print(printable(f"note: {sentence}"), file=sys.stderr)
    return exit_status.FINISHED
