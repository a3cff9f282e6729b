"""Ends the process of a finished command, even if user code has left a thread running."""

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
"""Seconds for which the process waits for its other threads after the command is done."""


def end_without_stragglers(status: int) -> None:
    """After `PATIENCE` seconds, exit even if other threads still run; at Ctrl-C or SIGTERM, exit immediately with the
    same status. To be called once the command is done.

    Python itself would wait for every non-daemon thread, without a limit.
    """
    end_at_a_press(status)
    threading.Thread(target=_end_stragglers, args=(status,), name="verbatim-leaving", daemon=True).start()


def _end_stragglers(status: int) -> None:
    time.sleep(PATIENCE)
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon and t.is_alive()]
    if not left:
        return
    logger.warning(
        "the process exits although threads started by an environment or a tool are still running (%d): %s",
        len(left),
        ", ".join(left[:5]),
    )
    with contextlib.suppress(Exception):  # exit handlers of user code must not prevent the exit
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
