"""What commands in sandboxes have written so far, before they have ended."""

from __future__ import annotations

from typing import Any

import pytest

from verbatim.environments.tools import sandbox


def what_sandboxes_say(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """The output of all sandboxes that are started from here on, as far as their readers have read it."""
    said, start = bytearray(), sandbox.start_async

    async def start_and_note(*given: Any, **how: Any) -> Any:
        process = await start(*given, **how)
        assert process.stdout is not None
        read = process.stdout.read

        async def read_and_note(size: int) -> bytes:
            chunk = await read(size)
            said.extend(chunk)
            return chunk

        monkeypatch.setattr(process.stdout, "read", read_and_note)
        return process

    monkeypatch.setattr(sandbox, "start_async", start_and_note)
    return said
