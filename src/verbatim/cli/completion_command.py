"""`verbatim completion SHELL`: prints the code that enables completion of this command in a shell."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

from verbatim.cli import exit_status
from verbatim.cli.completion import SHELLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the argument SHELL."""
    parser.epilog = 'in ~/.bashrc: eval "$(verbatim completion bash)"; docs/configuration.md has the other shells'
    parser.add_argument("shell", choices=SHELLS, help="the shell to print code for")


def run(args: argparse.Namespace) -> int:
    """Print the code for the shell."""
    print(shellcode(["verbatim"], shell=args.shell))
    return exit_status.FINISHED
