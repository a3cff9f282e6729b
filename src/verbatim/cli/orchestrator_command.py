"""`verbatim orchestrator FILE --run-dir FOLDER`: a run whose trainer is started separately, also on another host."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from verbatim.cli import rl_command
from verbatim.logs.checkpoints import CONFIG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verbatim rl` has."""
    rl_command.add_shared_arguments(parser)
    rl_command.add_output_arguments(parser)
    parser.epilog = "The trainer may run on another host: then --run-dir is a folder that both hosts share"


def run(args: argparse.Namespace) -> int:
    """Train. As `verbatim rl`.

    Raises:
        NothingTrained: the run came to its end and learned from no token.
        UsageError: an option that cannot be used.
    """

    def again(folder: Path) -> str:
        where = [str(folder / CONFIG), "--resume", str(folder)]
        return f"{shlex.join(['verbatim', 'trainer', *where])} & {shlex.join(['verbatim', 'orchestrator', *where])}"

    return rl_command.train(args, again, trainer_elsewhere=True)
