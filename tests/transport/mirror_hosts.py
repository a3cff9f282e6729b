"""What the tests of two hosts share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

KEY, SESSION = "a-key-of-16-bytes", "00112233445566ff"


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  nothing tells a test when it comes true
        await asyncio.sleep(0.01)


def folder_with(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path
