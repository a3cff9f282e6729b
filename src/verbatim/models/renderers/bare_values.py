"""Reads values that a format writes without quotes, `<parameter=at>null</parameter>`, by the types of their parameter.

Such a format writes several values alike: `null` for the text "null" and for no value, `5` for "5" and for 5. One rule
says which of them a text is, for every format:

- where only a text may stand, it is that text;
- where another value may stand too, or no type is declared, it is the null, the boolean, the number, the list or the
  object that it reads as, if such a type is declared; else it is the text. It is also the text if it has white space at
  an end, or a number that a double does not hold (`0.1234567890123456789`, `1e400`);
- where no text may stand, it is JSON or a word for a value, however it is spaced; what is neither is no value.

So a value that was read is written as a text that is read as the same value. The other of two values that are written
alike is never read: the text "null" of a parameter that may be null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from verbatim.models.renderers.responses import NOT_JSON, is_json, read_json, type_names

_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Words of templates that write `value | string`."""
_WORDS: Mapping[str, tuple[str, Any]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
"""Templates that write arguments as text write Python's words; the JSON type that makes one more than a word."""


def typed(text: str, types: frozenset[str], *, python_words: bool = False) -> Any:
    """The value that a text without quotes is, or `NOT_JSON`.

    Args:
        text: As it was sampled.
        types: The JSON types that the parameter may have; empty where none is declared.
        python_words: Whether the format writes Python's words, `None` for null. Where a type is declared they count in
            every format.

    >>> either = frozenset({"string", "null", "integer"})
    >>> [typed(text, either) for text in ("None", "5", "05", " 5")], typed("None", frozenset())
    ([None, 5, '05', ' 5'], 'None')
    """
    if types and "string" not in types:
        return _of_no_text(text, types)
    if types == {"string"}:
        return text
    value = _PYTHON[text] if text in _PYTHON and (types or python_words) else read_json(text)
    if value is NOT_JSON or isinstance(value, str) or (types and type_names(value).isdisjoint(types)):
        return text
    return value if text == text.strip() and is_json(value) and _is_exact(text, value) else text


def _of_no_text(text: str, types: frozenset[str]) -> Any:
    """The value of a text where none may stand. One of another type than is declared is for the tool to refuse; JSON
    text in quotes is a text with quotes, as formats write it."""
    is_word, meant = _word(text, types)
    if is_word:
        return meant
    value = _PYTHON[text] if text in _PYTHON else read_json(text)
    return text if isinstance(value, str) else value


def _word(text: str, types: frozenset[str]) -> tuple[bool, Any]:
    """Whether a text is a word for a value of one of these types, and the value.

    >>> _word("True", frozenset({"boolean"})), _word("None", frozenset({"integer"}))
    ((True, True), (False, None))
    """
    kind, value = _WORDS.get(text.strip().lower(), ("", None))
    return (True, value) if kind in types else (False, None)


def _is_exact(text: str, value: Any) -> bool:
    """Whether all fractions in a JSON text are the numbers that are read of them."""
    fractions = list[str]()
    if isinstance(value, (float, list, dict)):
        json.loads(text, parse_float=fractions.append)
    try:
        return all(Decimal(fraction) == Decimal(repr(float(fraction))) for fraction in fractions)
    except ArithmeticError:  # an exponent that even decimals do not hold
        return False
