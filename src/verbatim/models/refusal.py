"""What the code of an architecture raises, as a refusal that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verbatim.errors import ModelError, VerbatimError
from verbatim.machine_faults import is_out_of_memory


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception of a block into a `ModelError` that begins with `what`.

    Memory that ran out stays what it is: the model is not at fault.

    Raises:
        ModelError: names the fault, by its type too unless it is one that `transformers` raises for people.
    """
    try:
        yield
    except VerbatimError:
        raise
    except Exception as error:  # hundreds of architectures and file readers raise whatever they like
        if is_out_of_memory(error):
            raise
        said = str(error).strip() or "without a word"
        told = said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"
        raise ModelError(f"{what}: {told}") from error
