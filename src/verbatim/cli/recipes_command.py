"""`verbatim recipes` lists the runs that come with the package; `verbatim recipes copy NAME` copies one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.text import Text

from verbatim.cli import exit_status
from verbatim.config.recipe_files import programs, recipes
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.run.recipes import about, copy_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: the action, NAME and FOLDER."""
    parser.epilog = "a recipe's name stands for its file: verbatim rl guess_number, verbatim config guess_number"
    parser.add_argument("what", nargs="?", choices=("list", "copy"), default="list", help="list or copy (list)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to copy")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="FOLDER", help="the target folder (the current one)"
    )


def run(args: argparse.Namespace) -> int:
    """List the recipes, or copy one of them.

    Raises:
        UsageError: there is no such recipe, or a file to be written already exists.
    """
    console = PlainConsole()
    if args.what == "copy":
        if args.name is None:
            raise UsageError(f"verbatim recipes copy: which one? There are {', '.join(recipes())}")
        for path in copy_recipe(args.name, args.folder):
            console.print(f"wrote {path}", soft_wrap=True)
    elif args.name is not None:
        raise UsageError(
            f"verbatim recipes list takes no name, found {args.name}; to copy that one: verbatim recipes "
            f"copy {args.name}"
        )
    else:
        for name, path in recipes().items():
            console.print(Text.assemble((name, "bold"), f": {about(path)}"), soft_wrap=True)
        for name, path in programs().items():
            console.print(Text.assemble((name, "bold"), f": to copy: {path.name}"), soft_wrap=True)
    return exit_status.FINISHED
