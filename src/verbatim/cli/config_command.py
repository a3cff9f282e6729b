"""`verbatim config FILE [overrides]`: tries everything that a file names, and prints the resolved configuration."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from verbatim.cli import exit_status
from verbatim.config import dump_config, load_config
from verbatim.config.orchestrator import RendererConfig
from verbatim.orchestrator.staleness import capped_settings
from verbatim.renderers.base import Renderer
from verbatim.run.check import check_run
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables
from verbatim.texts import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE."""
    parser.add_argument("file", type=run_file, metavar="FILE", help="the run's TOML file, or a recipe's name")


def run(args: argparse.Namespace) -> int:
    """Print the configuration, defaults and overrides included; on standard error, what the staleness rule caps
    and which turns continue as they were sampled.

    Raises:
        UsageError: anything in it that would stop a run before it starts, as far as it can be known without loading
            weights and asking servers.
    """
    made: list[Renderer] = []
    config = load_config(args.file, args.overrides, component_tables())
    with contextlib.redirect_stdout(sys.stderr):  # what environments print is no TOML
        check_run(config, told=made.append)
    sys.stdout.write(dump_config(config))
    sys.stdout.flush()
    for sentence in capped_settings(config.orchestrator):
        print(printable(f"note: {sentence}"), file=sys.stderr)
    for renderer in made:
        for sentence in _continued(renderer, config.orchestrator.renderer):
            print(printable(f"note: {sentence}"), file=sys.stderr)
    return exit_status.FINISHED


def _continued(renderer: Renderer, settings: RendererConfig) -> Iterator[str]:
    """Which turns of this model continue as they were sampled."""
    from verbatim.renderers.continuations import continuations

    yield (
        f'renderer "{renderer.name}", thinking_retention = "{settings.thinking_retention}", history = '
        f'"{settings.history}":'
    )
    for kind, reason in continuations(renderer):
        outcome = "continues what was sampled" if reason is None else f"starts a new sample: {reason.sentence}"
        yield f"{kind} {outcome}"
