"""Packs ids and logprobs into one base64 string each, and reads them back bit for bit. The strings have a tenth of the
size of vLLM's JSON."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.types import Float32, Int32

PACKED = "packed"
"""In a request, under `protocol.OURS`: true asks the server to pack the response if it can. In a response: the result
of `pack`; the `token_ids` and `logprobs` of the choice are then null. Our servers support it, and so does vLLM with our
middleware (`vllm/plugin/verbatim_vllm_answers.py`)."""


def pack(ids: Int32, logprobs: Float32 | None) -> dict[str, str | None]:
    """Encode ids as int32 and logprobs as float32, little-endian, in base64.

    >>> pack(np.array([5, 7], dtype=np.int32), np.array([-0.5, -0.25], dtype=np.float32))
    {'token_ids': 'BQAAAAcAAAA=', 'logprobs': 'AAAAvwAAgL4='}
    """
    return {
        "token_ids": _text(ids.astype("<i4")),
        "logprobs": None if logprobs is None else _text(logprobs.astype("<f4")),
    }


def read_packed(value: object) -> tuple[Int32, Float32 | None]:
    """Decode the result of `pack` to ids (int32 [L]) and logprobs (float32 [L] or None).

    Raises:
        ValueError: a string is malformed, an id is negative, a logprob is not finite, or the number of logprobs is
            wrong.
    """
    strings = value if isinstance(value, dict) else {}
    ids = _array(strings.get("token_ids"), "<i4", "packed token_ids").astype(np.int32)
    if len(ids) and ids.min() < 0:
        raise ValueError(f"packed token_ids: expected token ids, found {ids.min()}")
    if strings.get("logprobs") is None:
        return ids, None
    logprobs = _array(strings["logprobs"], "<f4", "packed logprobs").astype(np.float32)
    if len(logprobs) != len(ids):
        raise ValueError(f"expected {len(ids)} logprobs, found {len(logprobs)}")
    if not np.isfinite(logprobs).all():
        raise ValueError("packed logprobs: expected a finite number for each id")
    return ids, logprobs


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: object, dtype: str, what: str) -> NDArray[Any]:
    if not isinstance(text, str):
        raise ValueError(f"{what}: expected an array as base64, found {type(text).__name__}")
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (binascii.Error, ValueError) as error:  # not ASCII, not base64, or not a multiple of four bytes
        raise ValueError(f"{what}: expected an array as base64, found {text[:80]!r} ({error})") from None
