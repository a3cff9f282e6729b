"""Parses the JSON of a body by the same rules in every server: UTF-8 as in RFC 8259, an optional byte order mark, and
neither NaN nor Infinity."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.inference.http.json_size import MOST_VALUES, check_json_size
from verbatim.inference.http.keys_twice import check_keys

_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LONG_NUMBER = re.compile(rb"\d{19}")
"""Matches 19 digits in a row. An integer with more than 64 bits has at least this many."""


def read_value(data: bytes | bytearray, most_values: int = MOST_VALUES) -> Any:
    r"""Parse a body with at most `most_values` values. Its strings may contain lone surrogates.

    Raises:
        UsageError: the body is not JSON or not UTF-8, has too many values or levels, or repeats a key in an object.

    >>> read_value(b'\xef\xbb\xbf{"a": 1}')
    {'a': 1}
    """
    text = without_mark(data)
    check_json_size(text, most_values=most_values)
    value = _parsed(text, len(data) - len(text))
    check_keys(text, value)
    return value


def _parsed(text: bytes | bytearray, offset: int) -> Any:
    """Parse JSON text. `offset` is its position in the body, for error messages."""
    if not _LONG_NUMBER.search(text):  # orjson turns integers with more than 64 bits into floats
        import orjson

        with contextlib.suppress(ValueError):  # Python's parser, below, accepts lone surrogates
            return orjson.loads(text)
    try:
        return json.loads(text.decode("utf-8", "surrogatepass"), parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the body is not UTF-8: byte 0x{text[error.start]:02x} at position {offset + error.start}; send JSON in "
            "UTF-8"
        ) from None
    except RecursionError:
        raise UsageError("the body is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {str(error)[:200]}") from None


def without_mark(data: bytes | bytearray) -> bytes | bytearray:
    """Return the body without its UTF-8 byte order mark, if it has one.

    Raises:
        UsageError: the body is in UTF-16 or UTF-32.
    """
    # JSON begins with ASCII characters, so a zero in the first two bytes means two or four bytes per character.
    if data.startswith(_OTHER_MARKS) or 0 in data[:2]:
        raise UsageError("the body is in UTF-16 or UTF-32; send JSON in UTF-8")
    return data[len(_MARK) :] if data.startswith(_MARK) else data


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's parser would accept. For `parse_constant` of `json.loads`."""
    raise ValueError(f"{constant} is not valid in JSON")
