"""Finds and copies the recipes that come with the package: complete configurations, some with a Python module."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from verbatim.config.recipe_files import programs, recipes
from verbatim.core.errors import UsageError
from verbatim.core.texts import nearest


def about(recipe: Path) -> str:
    """The comment at the top of a recipe, which says what the recipe trains, what it needs, and how long it took."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


def run_file(given: str | os.PathLike[str]) -> Path:
    """The configuration file that `given` names: a path, optionally with prime-rl's leading "@", or the name of a
    recipe.

    A file of this name takes precedence over a recipe.

    >>> run_file("no/such.toml").as_posix(), run_file("guess_number") == recipes()["guess_number"]
    ('no/such.toml', True)
    >>> run_file("@no/such.toml").as_posix()
    'no/such.toml'
    """
    path = Path(given)
    if path.parts[:1] and path.parts[0].startswith("@") and not path.exists():
        path = Path(os.fspath(given)[1:])
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    return recipes().get(path.name.replace("-", "_"), path)


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a recipe with the Python module of the same name, if any, or copy a program. Returns the files written.

    Raises:
        UsageError: there is no such recipe, or a file to be written already exists.
    """
    known = {**recipes(), **programs()}
    found = known.get(Path(name).stem.replace("-", "_"))
    if found is None:
        hint = nearest(name, known) or "."
        raise UsageError(f"there is no recipe {name!r}{hint} There are {', '.join(known)}")
    sources = [source for source in dict.fromkeys((found, found.with_suffix(".py"))) if source.is_file()]
    targets = [folder / source.name for source in sources]
    for target in targets:
        if target.exists():
            raise UsageError(f"{target} exists; remove it, or name another folder: verbatim recipes copy {name} FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in zip(sources, targets, strict=True):
        target.write_bytes(source.read_bytes())
    return targets
