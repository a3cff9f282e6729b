"""Contains helpers for records: array types, checks of numbers, and a way to set the fields of a frozen record."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError

Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]

TEACHER = "teacher"
"""Name of the logprob stream of the teacher."""
REFERENCE = "reference"
"""Name of the logprob stream of the frozen reference model."""
NO_STREAMS: MappingProxyType[str, Any] = MappingProxyType({})
"""An empty mapping: no logprob streams."""


def fill(record: object, **values: Any) -> None:
    """Set the fields of a frozen record. Only the record's own `__init__` and `__post_init__` may call this."""
    record.__dict__.update(values)


def as_number(value: Any, name: str, hint: str = "") -> float | None:
    """One number as a float. NaN and infinity are accepted here: they are found and counted where credit is assigned.

    Raises:
        RecordError: the value is a list, a string, an array with several elements, or an integer too large for a float.
    """
    if value is None or type(value) is float:
        return value
    # numpy's strings, dates and complex numbers also have a `__float__`.
    is_number = hasattr(type(value), "__float__") and not getattr(value, "ndim", None) and not isinstance(value, str)
    if is_number and getattr(getattr(value, "dtype", None), "kind", "f") not in "cmMOSU":
        try:
            return float(value)
        except OverflowError:
            pass
    raise RecordError(f"{name}: {value!r:.80}; expected one number or None{hint}")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself if it is read-only, otherwise a read-only view of it."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
