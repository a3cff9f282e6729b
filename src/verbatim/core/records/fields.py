"""Helpers of the records: array types, checks of numbers, and a way to fill a frozen record."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError

Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]

TEACHER = "teacher"
"""The logprob stream of the teacher."""
REFERENCE = "reference"
"""The logprob stream of the frozen model that the policy is kept near."""
NO_STREAMS: MappingProxyType[str, Any] = MappingProxyType({})
"""No logprobs of other models."""


def fill(record: object, **values: Any) -> None:
    """Set the fields of a frozen record; for its own `__init__` and `__post_init__` alone."""
    record.__dict__.update(values)


def as_number(value: Any, name: str, hint: str = "") -> float | None:
    """One number, NaN and infinity included: what cannot be learned from is found, and counted, where credit is given.

    Raises:
        RecordError: a list, a text, an array of several, an integer that no float can hold.
    """
    if value is None or type(value) is float:
        return value
    # numpy's texts, dates and complex numbers have a __float__ too.
    is_number = hasattr(type(value), "__float__") and not getattr(value, "ndim", None) and not isinstance(value, str)
    if is_number and getattr(getattr(value, "dtype", None), "kind", "f") not in "cmMOSU":
        try:
            return float(value)
        except OverflowError:
            pass
    raise RecordError(f"{name}: {value!r:.80}; expected one number or None{hint}")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself where it is read-only, else a read-only view of it."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
