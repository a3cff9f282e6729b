"""Finds the TOML files of the recipes that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path


def recipes() -> Mapping[str, Path]:
    """The TOML file of each recipe, by its name.

    >>> recipes()["guess_number"].name
    'guess_number.toml'
    """
    folder = Path(str(files("verbatim").joinpath("cli", "recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}
