"""Writes answers as JSON that every browser reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson


def to_json(value: Any) -> bytes:
    r"""UTF-8 JSON; numpy arrays as lists, NaN and infinities as null, lone surrogates as escapes.

    >>> to_json({"a": float("nan"), "b": "\udce9"})
    b'{"a": null, "b": "\\udce9"}'
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):  # a lone surrogate, an integer beyond 64 bits
        return json.dumps(_clean(value), allow_nan=False).encode()


def _clean(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value
