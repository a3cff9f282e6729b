"""Finds out whether an optional package is installed."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package can be imported, told without importing it.

    A folder of its name in the current directory is no package: wandb, for example, leaves a folder `wandb` where it
    has recorded something, and Python takes any folder for a namespace.

    >>> is_installed("json"), is_installed("no_such_package")
    (True, False)
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
