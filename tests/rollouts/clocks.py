"""The clock of an event loop is set forward: a deadline passes when a test says so, however slow the machine is.

What is to be cut off waits for ever under a limit of HANGS. The test waits until it does, and until all that is not to
be cut off has ended; then it sets the clock forward.
"""

from __future__ import annotations

import asyncio

from waiting import HANGS

PASSED = HANGS + 1
"""Set forward by so much, the clock is past every deadline of HANGS, and far from one of 600 s."""


def set_forward(seconds: float = PASSED, loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Set the clock of an event loop forward, which is the running one, unless another one calls this."""
    loop = loop or asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds
