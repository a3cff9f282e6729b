"""`verbatim completion SHELL` prints the lines that make a shell complete this command."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

from verbatim.cli import exit_status
from verbatim.cli.completion import SHELLS
from verbatim.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare SHELL."""
    parser.epilog = 'in ~/.bashrc: eval "$(verbatim completion bash)"; docs/shell_completion.md has the other shells'
    parser.add_argument("shell", choices=SHELLS, help="whose lines are printed")


def run(args: argparse.Namespace) -> int:
    """Print them.

    Raises:
        UsageError: an option; this command has no options.
    """
    if args.overrides:
        raise UsageError(f"verbatim completion has no option {args.overrides[0]}")
    print(shellcode(["verbatim"], shell=args.shell))
    return exit_status.FINISHED
