"""Converts exceptions raised by a model's code into readable errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verbatim.core.errors import ModelError, VerbatimError
from verbatim.core.machine_faults import is_out_of_memory

FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, ZeroDivisionError)
"""Exceptions that a model's code raises if it is called in an unsupported way."""


def describe(error: Exception) -> str:
    """Describe an error raised by a model's code in one line: its type and the first line of its text.

    Raises:
        Exception: the error itself if it is an out-of-memory error, because such an error is not the model's fault.
    """
    if is_out_of_memory(error):
        raise error
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception of a block into a `ModelError` that begins with `what`.

    Out-of-memory errors are raised unchanged, because they are not the model's fault.

    Raises:
        ModelError: contains the error's text, and its type unless it is an OSError or ValueError, whose texts are
            written for users.
    """
    try:
        yield
    except VerbatimError:
        raise
    except Exception as error:  # any type: hundreds of architectures and file readers share no base class
        if is_out_of_memory(error):
            raise
        text = str(error).strip() or "no message"
        told = text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
        raise ModelError(f"{what}: {told}") from error
