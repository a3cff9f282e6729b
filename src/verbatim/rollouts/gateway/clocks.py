"""Recognises those changes of a system prompt that come from a clock, a counter or a random id.

There are two rules. Two separate conversations are attributed to one agent only if their system prompts differ in
nothing but dates and times (`without_moments`). If one conversation continues under a changed system prompt, that is
already strong evidence for the same agent, so numbers, dates and random ids may differ too (`frame_words`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_TIME = r"\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm]\b)?(?:Z|[+-]\d\d:?\d\d)?"
_SECONDS = r"\d{10,19}\b"
"""Matches a Unix time in seconds, milliseconds, microseconds or nanoseconds."""
_NOW = (
    r"(?i:\bit's|\bas of|\b(?:it|today|now|time|date|clock|timestamp|epoch|currently)(?:[ \t](?:is|now))?)"
    r"(?:[ \t]\([\w ]{1,20}\))?[ \t]{0,2}[:=]?[ \t]{0,2}"
)
_MOMENT = re.compile(
    rf"\d{{4}}-\d\d-\d\d(?:[T ]?(?<!\d){_TIME})?"
    r"|(?<![\d:])\d{1,2}:\d\d(?::\d\d(?![:\d])(?:\.\d+)?(?: ?[AaPp][Mm]\b)?| ?[AaPp][Mm]\b)(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?<![\d:])\d{1,2}:\d\d(?:Z\b|\+\d\d:?\d\d)"
    rf"|(?P<now>{_NOW})(?:{_TIME}|{_SECONDS})"
    rf"|(?m:^)[^\w\n]{{0,3}}(?:{_TIME}|{_SECONDS})[^\w\n]{{0,3}}(?m:$)"
)
"""Matches any of three things: a date; an unambiguous time of day; or an ambiguous time of day or Unix time that
follows words such as "now is" or stands alone on a line."""

_UUID = re.compile(r"(?i:(?<![^\W_])[a-f\d]{8}(?:-[a-f\d]{4}){3}-[a-f\d]{12}(?![^\W_]))")
_HEX = re.compile(r"(?i:(?<![^\W_])[a-f\d]{4,}(?![^\W_]))")
_NUMBER = re.compile(r"(?<!\d)(?:(?<![\w)])[+-])?\d+(?:[.,'_:]\d+)*(?:(?:st|nd|rd|th)\b)?")
_DATE_WORD = (
    r"\b(?:(?i:am|pm|mon|tues?|wed|thu|thurs?|fri|sat|sun|(?:mon|tues|wednes|thurs|fri|satur|sun)day"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
    r"|january|february|march|april|june|july|august|september|october|november|december)|May)\b"
)
_BETWEEN = r"(?:\.?,?[ \t]{1,3}(?:(?:the|of)[ \t])?|[/.,\-])"
_DATE = re.compile(rf"(?:{_DATE_WORD}{_BETWEEN}){{0,6}}\0(?:{_BETWEEN}(?:{_DATE_WORD}|\0))*")
_TODAY = re.compile(rf"((?i:\b(?:today|it)(?:'s|[ \t]is)|\bday:)[ \t]){_DATE_WORD}")
_COUNTED = re.compile(r"(?:\b(?:is|are)\s{1,3})?\0((?:[ \t][^\W\d_]+){0,2})")
_BAR = re.compile(r"[\[(|][^\w\n\[(|]{1,200}[\])|]|[=#\-.*>~\u2500-\u25ff\u2b1b\u2b1c]{3,}")
"""Matches a progress bar that is drawn in text."""
_WORD = re.compile(r"""[^\W\d_]+[+#]*|(?<![^\s"'`(])[+\-*/<>=&|^~%](?=[\s"'`).,;:!?]|\Z)""")
"""Matches a word, including plus and hash signs at its end as in C++; or an operator that stands alone."""


def without_moments(text: str) -> str:
    """Remove the current date and time from a system prompt.

    >>> without_moments("You help. It is 15:47."), without_moments("Explain John 3:16 to account 1790000000.")
    ('You help. It is .', 'Explain John 3:16 to account 1790000000.')
    """
    return _MOMENT.sub(lambda found: found["now"] or "", text)


def frame_words(texts: Sequence[str]) -> list[str]:
    """Return the parts of a system prompt that stay the same while a clock or counter in the prompt advances. These
    parts are the prompt's words in order, without numbers, dates, random ids and most punctuation, and without the
    plural s of a word that follows a number.

    >>> frame_words(["Mon Nov 26, 9:59 AM. There are 2 steps left (#..) in run_3f2a91, in C++."])
    ['there', 'step', 'left', 'in', 'run', 'in', 'c++']
    >>> frame_words(["Do Monday's work in room dead4."])
    ['do', 'monday', 's', 'work', 'in', 'room', 'dead']
    """
    text = _UUID.sub("\0", "\n".join(texts).replace("\0", " "))
    text = _HEX.sub(lambda found: "\0" if _is_random(found[0].lower()) else found[0], text)
    text = _DATE.sub("\0", _NUMBER.sub("\0", text))
    text = _COUNTED.sub(_singular, _TODAY.sub(r"\1", text))
    return [word.lower() for word in _WORD.findall(_BAR.sub(" ", text))]


def _singular(found: re.Match[str]) -> str:
    return "\0" + "".join(f" {word.removesuffix('s') if len(word) > 3 else word}" for word in found[1].split())


def _is_random(digits: str) -> bool:
    """Return True if hexadecimal digits look random. They do not look random if they are a number, a word, a word
    followed by a number (`dead4`), or a letter followed by a number (`a100`). The function misses 1 in 2,500 random ids
    of 8 digits, 1 in 70 random ids of 6 digits, and 3 in 8 random ids of 4 digits."""
    if digits.isdecimal() or digits.isalpha():
        return False
    if len(digits) >= 8:
        return True
    changes = sum(a.isalpha() != b.isalpha() for a, b in pairwise(digits))
    return changes >= 2 or (len(digits) >= 6 and not re.fullmatch(r"[a-f]{4,}\d+", digits))
