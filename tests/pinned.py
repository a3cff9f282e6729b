"""What the installed packages lack is left out of tests, and never with the versions of constraints.txt."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest


def is_pinned(package: str) -> bool:
    """Whether the installed version, apart from its local part, is that of constraints.txt."""
    text = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(rf"^{re.escape(package)}==(.+)$", text, re.MULTILINE)
    return version(package).partition("+")[0] == pinned


def needs(there: bool, package: str, what: str) -> pytest.MarkDecorator:
    """Skips a test where another release than the pinned one lacks something; with the pinned one it runs and fails."""
    return pytest.mark.skipif(not there and not is_pinned(package), reason=f"{package} {version(package)} lacks {what}")
