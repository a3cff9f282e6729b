"""Loads the page from the built files in the folder `assets`, which are part of the wheel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import UsageError

FOLDER = Path(__file__).parent / "assets"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".txt": "text/plain",
    ".json": "application/json",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    data: bytes
    content_type: str


def load_assets(folder: Path = FOLDER) -> dict[str, Asset]:
    """Load the files of the page, by their path in the folder. Only these files are served.

    Raises:
        UsageError: the folder does not contain the page.
    """
    found = {
        path.relative_to(folder).as_posix(): Asset(path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }
    if INDEX not in found:
        raise UsageError(
            f"the page is missing: there is no {folder / INDEX}. Build it as described in viewer/README.md, or "
            "install the wheel"
        )
    return found
