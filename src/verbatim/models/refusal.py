"""Converts exceptions of an architecture's code to readable errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verbatim.core.errors import ModelError, VerbatimError
from verbatim.core.machine_faults import is_out_of_memory

FAULTS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError, ZeroDivisionError)
"""Exceptions of a model's code when it is called in an unexpected way."""


def describe(error: Exception) -> str:
    """An error of a model's code, in one line.

    Raises:
        Exception: the error itself, if memory ran out, because the model is not at fault.
    """
    if is_out_of_memory(error):
        raise error
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception of a block into a `ModelError` that begins with `what`.

    Out-of-memory errors pass unchanged, because the model is not at fault.

    Raises:
        ModelError: holds the error's text, with its type unless it is an OSError or ValueError of `transformers`.
    """
    try:
        yield
    except VerbatimError:
        raise
    except Exception as error:  # hundreds of architectures and file readers raise anything
        if is_out_of_memory(error):
            raise
        said = str(error).strip() or "without a word"
        told = said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"
        raise ModelError(f"{what}: {told}") from error
