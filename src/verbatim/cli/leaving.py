"""Ends the process even where a grader or a tool left a thread behind."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time

PATIENCE = 5.0
"""Seconds that other threads may take to end after the command has."""

logger = logging.getLogger(__name__)


def end_without_stragglers(status: int) -> None:
    """Called when the command is done: from `PATIENCE` seconds on, threads that still run end with the process; at
    Ctrl-C or SIGTERM, at once, with the same status.

    Python itself waits for every thread that is not a daemon, without limit.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))
    threading.Thread(target=_watch, args=(status,), name="verbatim-leaving", daemon=True).start()


def ignore_signals_at_the_very_end() -> None:
    """Called when the process begins: while Python takes itself down, after all `atexit` functions, it has no handlers
    any more, and a signal would end a command that is done with the signal's status."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)


def _watch(status: int) -> None:
    time.sleep(PATIENCE)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
    left = [name for name in left if name != threading.main_thread().name]
    if not left:
        return
    logger.warning("the process ends, though %d threads that an environment or a tool started still run: %s",
                   len(left), ", ".join(left[:5]))  # fmt: skip
    with contextlib.suppress(Exception):  # others' functions, the last thing that runs
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
