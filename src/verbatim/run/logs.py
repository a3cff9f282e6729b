"""Sets up the logging of a process: to the console, and into a file of the run folder."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from verbatim.core.errors import VerbatimError
from verbatim.core.machine_faults import describe, is_out_of_memory
from verbatim.core.redaction import WithoutSecrets
from verbatim.core.texts import end_of_file, printable

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _Plain(WithoutSecrets):
    """Escapes control characters, so that text quoted in a record cannot send commands to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _LogFileHandler(logging.FileHandler):
    """Reports a failed write once, instead of printing a traceback for each record as Python does."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"the log cannot be written: {printable(describe(error, self.baseFilename))}\n")

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # closing flushes the buffer, which fails on a full disk
            self.handleError(logging.makeLogRecord({}))


def log_to_console(console: Console, level: int = logging.INFO) -> None:
    """Log to the console, from this level on. Of chatty libraries, log only warnings."""
    logging.basicConfig(handlers=[_on_console(console, level)])
    logging.getLogger().setLevel(logging.INFO)
    for noisy in ("httpx", "transformers", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextlib.contextmanager
def log_for_a_while(console: Console, level: int) -> Iterator[None]:
    """While the block runs, show log records on the console, unless the program has installed its own handlers, and
    record Verbatim's INFO messages. Afterwards logging is as before."""
    root, ours = logging.getLogger(), logging.getLogger("verbatim")
    level_before = ours.level
    handler = None if root.handlers else _on_console(console, level)
    if handler is not None:
        root.addHandler(handler)
    ours.setLevel(min(logging.INFO, ours.getEffectiveLevel()))
    try:
        yield
    finally:
        ours.setLevel(level_before)
        if handler is not None:
            root.removeHandler(handler)


def _on_console(console: Console, level: int) -> logging.Handler:
    handler = _ConsoleHandler(console, level)
    handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


class _ConsoleHandler(logging.Handler):
    """Prints each record as one unwrapped line, so that paths and code can be copied. Records go through the rich
    console, which redraws its live view below them. An INFO record is printed only once: the check before a run and
    the run itself log the same notes."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self._console = console
        self._noted: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            if (note := record.getMessage()) in self._noted:
                return
            self._noted.add(note)
        try:
            text = Text(self.format(record))
            text.stylize(_STYLES.get(record.levelno, "dim"), 20, 27)  # columns of the level name, after the date
            self._console.print(text, soft_wrap=True)
        except (OSError, ValueError):  # the stream is closed, or cannot write the text
            self.handleError(record)


_STARTED = "started (process "
"""Begins the first record of each process in a log file; `last_lines` looks for it."""


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Context manager: logs to a file. If an exception ends the block, the exception is logged too, so that the run's
    other process can quote it."""
    handler = _LogFileHandler(path, encoding="utf-8")
    handler.setFormatter(_Plain(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    logger = logging.getLogger(__name__)
    _write(handler, logger, f"{_STARTED}{os.getpid()})", level=logging.INFO)
    try:
        yield
    except KeyboardInterrupt as error:
        _write(handler, logger, f"ended by {str(error) or 'Ctrl-C'}")
        raise
    except Exception as error:
        if isinstance(error, VerbatimError | OSError) or is_out_of_memory(error):
            first_line, *_ = describe(error).splitlines() or [""]
            _write(handler, logger, f"ended: {first_line}")  # further lines would repeat the other process's log
        else:
            _write(handler, logger, "ended by an error", error)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def last_lines(log: Path, count: int = 8) -> str:
    """The last lines logged by the latest process that wrote this log, formatted for the end of an error message."""
    try:
        lines = end_of_file(log)
    except OSError:
        return ""
    started = max((number for number, line in enumerate(lines, start=1) if _STARTED in line), default=0)
    if started == len(lines):
        return f"\nits log {log} has no further records"
    return "\n".join([f"\nthe last lines of {log}:", *(f"    {line}" for line in lines[started:][-count:])])


def _write(
    handler: logging.Handler,
    logger: logging.Logger,
    message: str,
    error: Exception | None = None,
    *,
    level: int = logging.ERROR,
) -> None:
    """Write to the file alone; the console gets the exception from the command itself."""
    info = (type(error), error, error.__traceback__) if error is not None else None
    handler.emit(logger.makeRecord(logger.name, level, "", 0, message, (), info))
