"""Parses values that formats write without quotes, such as `null` in `<parameter=at>null</parameter>`. The result
depends on the types that the parameter allows.

These formats write different values the same way: `null` for the string "null" and for null, `5` for "5" and for 5. One
rule decides between them, for every format:

- if the parameter allows only strings, the value is the text;
- if it allows other types too, or declares no types, the value is the null, boolean, number, list or object that the
  text parses to, provided that this type is allowed. Otherwise the value is the text. The value is also the text if the
  text has leading or trailing white space, or contains a number that a double cannot represent
  (`0.1234567890123456789`, `1e400`);
- if it does not allow strings, the value is JSON or a word such as `None`, with any white space around it. Other text
  is not a value.

So writing a parsed value and parsing it again returns the same value. If two values are written the same way, parsing
never returns one of them: for a parameter that may be null, it never returns the string "null".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from verbatim.models.renderers.responses import NOT_JSON, is_json, read_json, type_names

_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Python's words for null and the booleans, which templates write with `value | string`."""
_WORDS: Mapping[str, tuple[str, Any]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
"""Words for values, in lower case, with the JSON type that the parameter must allow for the word to count, and the
value."""


def typed(text: str, types: frozenset[str], *, python_words: bool = False) -> Any:
    """The value that a text without quotes represents, or `NOT_JSON`.

    Args:
        text: The text as it was sampled.
        types: The JSON types that the parameter allows; empty if it declares no types.
        python_words: True if the format writes Python's words, such as `None` for null. If types are declared, these
            words count in every format.

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
    """The value that a text stands for, given that the text's parameter does not allow strings.

    A value of an undeclared type is returned too, because the tool decides whether to refuse such a value. A JSON
    string keeps its quotes, because the format itself would not write quotes.
    """
    is_word, meant = _word(text, types)
    if is_word:
        return meant
    value = _PYTHON[text] if text in _PYTHON else read_json(text)
    return text if isinstance(value, str) else value


def _word(text: str, types: frozenset[str]) -> tuple[bool, Any]:
    """(True if the text is a word for a value of one of these types, the value).

    >>> _word("True", frozenset({"boolean"})), _word("None", frozenset({"integer"}))
    ((True, True), (False, None))
    """
    kind, value = _WORDS.get(text.strip().lower(), ("", None))
    return (True, value) if kind in types else (False, None)


def _is_exact(text: str, value: Any) -> bool:
    """True if every fraction in a JSON text survives conversion to a double and back."""
    fractions = list[str]()
    if isinstance(value, (float, list, dict)):
        json.loads(text, parse_float=fractions.append)
    try:
        return all(Decimal(fraction) == Decimal(repr(float(fraction))) for fraction in fractions)
    except ArithmeticError:  # an exponent that even Decimal cannot represent
        return False
