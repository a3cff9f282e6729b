"""`verbatim orchestrator FILE --run-dir FOLDER`: rollouts and batches of a run whose trainer is started by itself."""

from __future__ import annotations

import argparse

from verbatim.cli import rl_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verbatim rl` has."""
    rl_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """As `verbatim rl`, with a trainer that somebody else starts."""
    return rl_command.run(args, trainer_elsewhere=True)
