"""Refuses lone surrogates in JSON. JSON may escape an emoji as two surrogates; a client that cuts the text between the
two leaves a lone surrogate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from verbatim.inference.http.refused import Refused

_SURROGATE = re.compile("[\ud800-\udfff]")


def refuse_lone_surrogates(value: object) -> None:
    r"""Refuse a JSON value with a lone surrogate in a string or a key, because neither UTF-8 nor tokenizers can encode
    a lone surrogate. The depth of the value must be checked first, because the search is recursive.

    Raises:
        Refused: the message has the path, the character and its position, and says what to send instead. The field has
            no list indices: "messages.content".

    >>> try:
    ...     refuse_lone_surrogates({"messages": [{"content": "so \ud83d"}]})
    ... except Refused as refused:
    ...     print(refused.field, "|", refused.message.partition(";")[0])
    messages.content | messages[0].content contains the lone surrogate U+D83D at position 3, half of a character
    """
    import orjson

    try:
        orjson.dumps(value)
    except TypeError:  # a lone surrogate, but also an integer with more than 64 bits or hundreds of levels
        found = next(_found(value, "", ""), None)
        if found is not None:
            raise found from None


def _found(value: object, place: str, field: str) -> Iterator[Refused]:
    if isinstance(value, str):
        if broken := _SURROGATE.search(value):
            yield _refusal(broken, field, place or "the body")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if broken := _SURROGATE.search(key):
                yield _refusal(broken, field, f"a key of {place or 'the body'}")
            yield from _found(item, f"{place}.{key}" if place else key, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from _found(item, f"{place}[{k}]", field)


def _refusal(broken: re.Match[str], field: str, place: str) -> Refused:
    sentence = (
        f"{place[:200]} contains the lone surrogate U+{ord(broken[0]):04X} at position {broken.start()}, half of "
        r'a character; send both halves (as in "\ud83d\ude42"), or leave it out'
    )
    return Refused(400, sentence, field=field[:120], unknown=True)
