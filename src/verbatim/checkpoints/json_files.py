"""JSON files that are replaced whole, and folders that are safe on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from verbatim.errors import CheckpointError


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value; a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
        CheckpointError: no such file, or no JSON in it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} holds no JSON: {error}") from None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
