"""`verbatim completion SHELL` prints the lines that make a shell complete this command."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

from verbatim.cli import exit_status
from verbatim.cli.completion import SHELLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare SHELL."""
    parser.epilog = 'in ~/.bashrc: eval "$(verbatim completion bash)"; docs/configuration.md has the other shells'
    parser.add_argument("shell", choices=SHELLS, help="whose lines are printed")


def run(args: argparse.Namespace) -> int:
    """Print them."""
    print(shellcode(["verbatim"], shell=args.shell))
    return exit_status.FINISHED
