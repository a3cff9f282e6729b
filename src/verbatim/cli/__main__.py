"""`python -m verbatim.cli`: the command without its console script."""

from verbatim.cli.main import program

program()
