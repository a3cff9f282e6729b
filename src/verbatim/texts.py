"""Text from elsewhere (an environment, a model, a path), made fit to be kept and shown: bounded, and inert in a
terminal."""

from __future__ import annotations

import re

LONGEST_ERROR = 2000
"""Characters of an exception's text that are kept."""

# C0 without tab and newline, DEL and C1 (terminal sequences begin with them), line separators, marks that reverse the
# direction of what follows, and lone surrogates, which no encoding can write.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cut(text: str, limit: int = LONGEST_ERROR) -> str:
    """The beginning of a text; where something is cut off, it says how much.

    >>> cut("abcdef", 4)
    'abcd [cut: 2 of 6 characters]'
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [cut: {len(text) - limit:,} of {len(text):,} characters]"


def error_text(error: BaseException, limit: int = LONGEST_ERROR) -> str:
    """An exception as `KeyError: 'x'`, cut; also one whose own `__str__` fails.

    >>> error_text(KeyError("x")), error_text(SystemExit())
    ("KeyError: 'x'", 'SystemExit')
    """
    try:
        said = str(error)
    except BaseException as failure:  # noqa: BLE001  the class of an exception is the user's, and so is its `__str__`
        said = f"(its text cannot be read: {type(failure).__name__})"
    return cut(f"{type(error).__name__}: {said}" if said else type(error).__name__, limit)


def shown(value: object, limit: int = 200) -> str:
    """The `repr` of a user's object, cut; also of one whose `__repr__` fails."""
    try:
        return cut(repr(value), limit)
    except BaseException as failure:  # noqa: BLE001  as above
        return f"a {type(value).__name__} (its repr raised {type(failure).__name__})"


def printable(text: str) -> str:
    r"""The text with every control character but tab and newline written out, so that a terminal shows it and obeys
    nothing.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
