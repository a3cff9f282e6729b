"""Parses option values that several commands use."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """Parse an option whose value is a JSON object. For `type=` of argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def number(kind: type[int] | type[float], expected: str, fits: Callable[[float], bool]) -> Callable[[str], Any]:
    """Make a parser for an option whose value is a number. For `type=` of argparse.

    Args:
        kind: The type of the number. A string that is not a number counts as NaN.
        expected: What to type, for the message.
        fits: Returns True if the number is allowed.
    """

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return value

    return read


COUNT = number(int, "a whole number of at least 1", lambda value: value >= 1)
FROM_ZERO = number(int, "a whole number of at least 0", lambda value: value >= 0)
SECONDS = number(float, "seconds, more than 0", lambda value: 0 < value < math.inf)
SHARE = number(float, "a share above 0, at most 1", lambda value: 0 < value <= 1)
