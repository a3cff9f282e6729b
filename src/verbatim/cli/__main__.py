"""`python -m verbatim.cli`: the command without its script."""

from verbatim.cli.main import program

program()
