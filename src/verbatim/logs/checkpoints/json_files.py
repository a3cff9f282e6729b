"""Reads JSON files, and replaces them atomically."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.disk import read_regular, write_file
from verbatim.core.errors import CheckpointError
from verbatim.core.formats import content_of, stamped


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value atomically; also safe against a loss of power."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """The JSON value in a file.

    Args:
        path: The file.
        parse: Makes the value of the file's text.

    Raises:
        CheckpointError: no such file, a link, or invalid JSON.
    """
    try:
        return parse(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON: {error}") from None


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """`write_json` of a file whose name has a number in `FORMATS`."""
    write_json(path, stamped(path.name, content))


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        CheckpointError: as `read_json`.
        FormatError: the file has another number, or none.
    """
    return content_of(path.name, read_json(path), path)
