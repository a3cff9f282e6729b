"""Finds the recipes that come with the package, and the programs and notebooks next to them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path


def recipes() -> Mapping[str, Path]:
    """The TOML file of each recipe, by name.

    >>> recipes()["guess_number"].name
    'guess_number.toml'
    """
    return {path.stem: path for path in sorted(_folder("recipes").glob("*.toml"))}


def programs() -> Mapping[str, Path]:
    """The programs and notebooks, by name. Unlike recipes, they are copied instead of being run by name.

    >>> sorted(programs())
    ['first_steps', 'minimal_rl', 'run', 'train']
    """
    found = [*_folder("recipes").glob("*.py"), *_folder("examples").glob("*.[ip]*")]
    return {
        path.stem: path for path in sorted(found, key=lambda path: path.stem) if not path.with_suffix(".toml").is_file()
    }


def _folder(name: str) -> Path:
    return Path(str(files("verbatim").joinpath("cli", name)))
