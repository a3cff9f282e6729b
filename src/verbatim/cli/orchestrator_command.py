"""`verbatim orchestrator FILE --run-dir FOLDER`: runs the rollouts of a run whose trainer is started separately."""

from __future__ import annotations

import argparse

from verbatim.cli import rl_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verbatim rl` has, and --trajectory-strategy."""
    rl_command.add_arguments(parser)
    add_trajectory_strategy(parser)


def add_trajectory_strategy(parser: argparse.ArgumentParser) -> None:
    """Declare the short form of an override; both processes of a run are given the same."""
    parser.add_argument(
        "--trajectory-strategy", metavar="NAME", help="the same as --orchestrator.trajectory-strategy NAME"
    )


def with_trajectory_strategy(args: argparse.Namespace) -> list[str]:
    """The overrides, the short form written out."""
    if args.trajectory_strategy is None:
        return list(args.overrides)
    return [*args.overrides, "--orchestrator.trajectory-strategy", args.trajectory_strategy]


def run(args: argparse.Namespace) -> int:
    """As `verbatim rl`, with a trainer that is started separately."""
    args.overrides = with_trajectory_strategy(args)
    return rl_command.run(args, trainer_elsewhere=True)
