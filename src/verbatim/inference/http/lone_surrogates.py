"""Finds half a character in JSON: an emoji is written as two escapes, of which a client may have cut one off."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class LoneSurrogate:
    """Half of a pair of surrogates in a JSON value. No encoding can write it, and no tokenizer reads it."""

    field: str
    """Where it stands: dotted, in lists without the index, "messages.content"."""
    sentence: str
    """Names the place, the character and its position, and says what to send."""


def find_lone_surrogate(value: object) -> LoneSurrogate | None:
    r"""The first lone surrogate in the texts and keys of a JSON value, which is less deep than Python's stack.

    >>> found = find_lone_surrogate({"messages": [{"content": "so \ud83d"}]})
    >>> print(found.field, "|", found.sentence.partition(";")[0])
    messages.content | messages[0].content holds the lone surrogate U+D83D at position 3, half of a character
    """
    import orjson

    try:
        orjson.dumps(value)
    except TypeError:  # it writes no such character, nor integers of more than 64 bits, nor hundreds of levels
        return next(_found(value, "", ""), None)
    return None


def _found(value: object, place: str, field: str) -> Iterator[LoneSurrogate]:
    if isinstance(value, str):
        if broken := _SURROGATE.search(value):
            yield _told(broken, field, place or "the body")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if broken := _SURROGATE.search(key):
                yield _told(broken, field, f"a key of {place or 'the body'}")
            yield from _found(item, f"{place}.{key}" if place else key, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from _found(item, f"{place}[{k}]", field)


def _told(broken: re.Match[str], field: str, place: str) -> LoneSurrogate:
    sentence = (
        f"{place[:200]} holds the lone surrogate U+{ord(broken[0]):04X} at position {broken.start()}, half of "
        r'a character; send both halves (as in "\ud83d\ude42"), or leave it out'
    )
    return LoneSurrogate(field=field[:120], sentence=sentence)
