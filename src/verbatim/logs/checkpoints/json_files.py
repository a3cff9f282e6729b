"""Reads JSON files, and writes them atomically."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verbatim.core.disk import read_regular, write_file
from verbatim.core.errors import CheckpointError
from verbatim.core.formats import content_of, stamped


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value atomically. After a crash or power failure, the file has either the old or the new value."""
    write_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path, parse: Callable[[str], Any] = json.loads) -> Any:
    """Read the JSON value in a file.

    Args:
        path: The file.
        parse: Converts the file's text to the value.

    Raises:
        CheckpointError: the file does not exist, is a link, or is not valid JSON.
    """
    try:
        return parse(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with its format number, which is listed in `core.formats.FORMATS` under the file's name."""
    write_json(path, stamped(path.name, content))


def read_record(path: Path) -> dict[str, Any]:
    """Read the content that `write_record` wrote.

    Raises:
        CheckpointError: as for `read_json`.
        FormatError: the file has a different format number, or no format number.
    """
    return content_of(path.name, read_json(path), path)
