"""Writes files for other processes: a reader sees all of a file or no file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verbatim.core.disk import make_private, replacing
from verbatim.core.errors import RunStopped

_BUFFER = 2**18
"""Bytes from which on a part is written by itself."""


def publish_bytes(path: Path, data: bytes | Iterable[memoryview], *, private: bool = False) -> None:
    """Write under another name, then rename. Not synced to disk: after a crash it is not read any more.

    Args:
        path: The file.
        data: Its content, whole or in parts, one after the other.
        private: Whether its owner alone may read it.

    Raises:
        OSError: the system refused to write; no file of this name, or the one before, is there.
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
    """`publish_bytes` of a JSON value."""
    publish_bytes(path, json.dumps(value).encode())


def read_published_json(path: Path) -> Any | None:
    """The value of a file that `publish_json` wrote; None if there is none yet.

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
