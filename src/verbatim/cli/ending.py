"""Ends the process of a command that is done, even where a grader or a tool left a thread behind."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time

from verbatim.core.ctrl_c import end_at_a_press

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that other threads may take to end after the command has."""


def end_without_stragglers(status: int) -> None:
    """Called when the command is done: from `PATIENCE` seconds on, threads that still run end with the process; at
    Ctrl-C or SIGTERM, at once, with the same status.

    Python itself waits for every thread that is not a daemon, without limit.
    """
    end_at_a_press(status)
    threading.Thread(target=_end_stragglers, args=(status,), name="verbatim-leaving", daemon=True).start()


def _end_stragglers(status: int) -> None:
    time.sleep(PATIENCE)
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon and t.is_alive()]
    if not left:
        return
    logger.warning(
        "the process ends, though %d threads that an environment or a tool started still run: %s",
        len(left),
        ", ".join(left[:5]),
    )
    with contextlib.suppress(Exception):  # others' functions, the last thing that runs
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
