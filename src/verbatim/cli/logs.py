"""Where the log of a process goes: to people, and into a file beside the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from verbatim.errors import VerbatimError

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_console(console: Console) -> None:
    """Warnings and notes of ours; of libraries only what is worth a look."""
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    _quieten()


def _quieten() -> None:
    for noisy in ("httpx", "transformers", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """The same into a file, and whatever ends the block with an exception: the other process quotes it."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    _quieten()
    logger = logging.getLogger(__name__)
    try:
        yield
    except (VerbatimError, OSError) as error:
        _write(handler, logger, f"ended: {error}")
        raise
    except KeyboardInterrupt:
        _write(handler, logger, "ended by Ctrl-C")
        raise
    except Exception as error:
        _write(handler, logger, "ended by a fault", error)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def _write(handler: logging.Handler, logger: logging.Logger, message: str, error: Exception | None = None) -> None:
    """Into the file alone: the console hears of it from the command's shell."""
    info = (type(error), error, error.__traceback__) if error is not None else None
    handler.emit(logger.makeRecord(logger.name, logging.ERROR, "", 0, message, (), info))
