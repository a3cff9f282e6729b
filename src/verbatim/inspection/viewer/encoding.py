"""Encodes answers as JSON that every browser can parse."""

from __future__ import annotations

import json
from typing import Any

import orjson

from verbatim.run.evaluation.as_json import finite


def to_json(value: Any) -> bytes:
    r"""Encode a value as UTF-8 JSON: numpy arrays as lists, NaN and infinities as null, lone surrogates as escapes.

    >>> to_json({"a": float("nan"), "b": "\udce9"})
    b'{"a": null, "b": "\\udce9"}'
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):  # the value has a lone surrogate, or an integer beyond 64 bits
        return json.dumps(finite(value), allow_nan=False).encode()
