"""`verbatim orchestrator FILE --run-dir FOLDER`: runs everything except the trainer, which is started separately."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from verbatim.cli import rl_command
from verbatim.logs.checkpoints import CONFIG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, all of which `verbatim rl` has too."""
    rl_command.add_shared_arguments(parser)
    rl_command.add_output_arguments(parser)
    parser.epilog = "The trainer may run on another host: then --run-dir must be a folder that both hosts share"


def run(args: argparse.Namespace) -> int:
    """Train, as `verbatim rl` does.

    Raises:
        NothingTrained: the run finished without training on a single token.
        UsageError: an option cannot be used.
    """

    def again(folder: Path) -> str:
        where = [str(folder / CONFIG), "--resume", str(folder)]
        return f"{shlex.join(['verbatim', 'trainer', *where])} & {shlex.join(['verbatim', 'orchestrator', *where])}"

    return rl_command.train(args, again, trainer_elsewhere=True)
