"""Writes files for other processes atomically: a reader sees either the complete file or no file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verbatim.core.disk import make_private, replacing
from verbatim.core.errors import RunStopped

_BUFFER = 2**18
"""Size of the write buffer in bytes; a part of at least this size bypasses the buffer."""


def publish_bytes(path: Path, data: bytes | Iterable[memoryview], *, private: bool = False) -> None:
    """Write a file under a temporary name, then rename it. The file is not synced to disk, because nobody reads it
    again after a crash of the machine.

    Args:
        path: The file.
        data: Its content, whole or as parts to concatenate.
        private: True if only the file's owner may read it.

    Raises:
        OSError: the system refused to write; `path` is unchanged.
    """
    with replacing(path, lasting=False) as temporary:
        if private:
            make_private(temporary)
        if isinstance(data, bytes):
            temporary.write_bytes(data)
        else:
            with temporary.open("wb", buffering=_BUFFER) as file:
                file.writelines(data)


def publish_json(path: Path, value: Any) -> None:
    """Write a JSON value with `publish_bytes`."""
    publish_bytes(path, json.dumps(value).encode())


def read_published_json(path: Path) -> Any | None:
    """Read a file that `publish_json` wrote; None if it does not exist yet.

    Raises:
        RunStopped: the file is damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise RunStopped(
            f"{path}, which one process of the run wrote for the other, is damaged: {error}; resume the run"
        ) from None
