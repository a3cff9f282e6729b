"""Recognises faults of the machine (full or failing disk, too many open files, no memory), not of a user's input."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ESTALE,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ENOLCK,
    }
)
"""System errors that the user cannot avoid with a different command line. Errors about missing or forbidden folders are
not included, because the user can name another folder."""

_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
_RUST = re.compile(r"\(os error (\d+)\)")
_PYTHON = re.compile(r"^\[Errno \d+\] ")


def is_machine_fault(error: BaseException) -> bool:
    """True if an error, or an error in its chain of causes and contexts, is a fault of the machine."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if is_out_of_memory(found):
            return True
        number = found.errno if isinstance(found, OSError) else _number_in(found)
        if number in ERRNOS:
            return True
        found = found.__cause__ or found.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out in Python, numpy or torch, on a CPU or a device.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    False
    """
    if isinstance(error, MemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RecursionError)  # a RuntimeError whose text may mention memory
        and (type(error).__name__ == "OutOfMemoryError" or any(text in str(error).lower() for text in _NO_MEMORY))
    )


def describe(error: BaseException, where: object = None) -> str:
    """A system or out-of-memory error in one line: what happened, and the file or the position in the code.

    Args:
        error: An OSError, or an error for which `is_out_of_memory` is true; for any other error its text is returned.
        where: The file or folder in use, for errors without a file name.

    >>> describe(OSError(errno.ENOSPC, "No space left on device"), "runs/a")
    'No space left on device (runs/a)'
    """
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        _, target, why = error.args[0][0]  # the first file of a copied tree that failed
        return f"{_PYTHON.sub('', str(why)).partition(': ')[0]} ({target})"
    if isinstance(error, OSError):
        name = error.filename if error.filename is not None else where
        text = str(error.strerror or error)
        return f"{text} ({os.fsdecode(name)})" if isinstance(name, str | bytes | Path) else text
    if is_out_of_memory(error):
        text = str(error).partition("\n")[0]
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if f"{os.sep}verbatim{os.sep}" in frame.filename] or frames
        at = f", in {ours[-1].name} ({ours[-1].filename}:{ours[-1].lineno})" if ours else ""
        return f"out of memory{f': {text}' if text else ''}{at}"
    return str(error)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Set the file name of an OSError raised in the block, because the errors of write, flush and sync have no file
    name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def rust_errors_as_oserror(path: Path | str) -> Iterator[None]:
    """Convert system errors of Rust libraries (safetensors, tokenizers) to OSError in a block that writes. These
    libraries raise exceptions of other classes, with a text that ends in "(os error 28)".

    Raises:
        OSError: a converted error. It has the error number found in the original error's text, and the file name
            `path`.
    """
    try:
        with naming(path):
            yield
    except Exception as error:
        number = _number_in(error)
        if number is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        if type(error).__name__ == "SafetensorError":
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise


def _number_in(error: BaseException) -> int | None:
    """The error number in the text of a Rust library's exception, or None if there is none."""
    if isinstance(error, OSError) or not isinstance(error, Exception):
        return None
    found = _RUST.search(str(error))
    return int(found[1]) if found else None
