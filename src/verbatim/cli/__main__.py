"""Runs the command as `python -m verbatim.cli`, without its console script."""

from verbatim.cli.main import program

program()
