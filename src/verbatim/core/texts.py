"""Makes external text (from environments, models, paths) safe to store and print: bounded, and inert in a terminal."""

from __future__ import annotations

import difflib
import itertools
import math
import re
import reprlib
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from verbatim.core.redaction import without_secrets

_MOST_SHOWN = 10_000
MOST_READ = 65_536
"""Maximum number of characters of a string that are searched for keys; searching a megabyte would take a second."""
LONGEST_ERROR = 2000
"""Maximum number of characters kept of an exception's text."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 80

# C0 without tab and newline, DEL and C1 (terminal sequences begin with them), line separators, marks that change the
# text direction, and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def cut(text: str, limit: int = LONGEST_ERROR) -> str:
    """The beginning of a string, with a note of how much was cut.

    >>> cut("abcdef", 4)
    'abcd [cut: 2 of 6 characters]'
    """
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [cut: {len(text) - limit:,} of {len(text):,} characters]"


def error_text(error: BaseException, limit: int = LONGEST_ERROR) -> str:
    """An exception as `KeyError: 'x'`, cut and without keys; works even if the exception's `__str__` raises.

    >>> error_text(KeyError("x")), error_text(SystemExit())
    ("KeyError: 'x'", 'SystemExit')
    """
    try:
        said = str(error)
    except BaseException as failure:  # noqa: BLE001  the exception class and its `__str__` may be user code
        said = f"(its text cannot be read: {type(failure).__name__})"
    name = type(error).__name__
    return cut_without_secrets(f"{name}: {said}" if said else name, limit)


def cut_without_secrets(text: str, limit: int = LONGEST_ERROR) -> str:
    """Same as `cut`, but with keys redacted. Only the beginning of a long string is searched for keys.

    >>> cut_without_secrets("Bearer abc failed", 17)
    'Bearer [redacted] [cut: 7 of 24 characters]'
    """
    most = max(MOST_READ, 2 * limit)
    if len(text) <= most:
        return cut(without_secrets(text), limit)
    return f"{without_secrets(text[:most])[:limit]} [cut: {len(text) - limit:,} of {len(text):,} characters]"


def shown(value: object, limit: int = 200) -> str:
    """The `repr` of a user's object, cut. Works even if the object's `__repr__` raises, if lists are nested too deeply,
    or if lists contain each other so often that their `repr` would never end."""
    try:
        try:
            return cut(reprlib.repr(value) if _is_vast(value) else repr(value), limit)
        except RecursionError:
            return cut(reprlib.repr(value), limit)
    except BaseException as failure:  # noqa: BLE001  as above
        return f"a {type(value).__name__} (its repr raised {type(failure).__name__})"


def brief(value: object) -> str:
    """A short quote of an untrusted value for a message; the time taken does not depend on the size of the value.

    >>> brief("hot"), len(brief([[0] * 10**6] * 10))
    ("'hot'", 80)
    """
    return _REPR.repr(value)[:80]


def _is_vast(value: object) -> bool:
    """True if nested lists and dicts hold more than `_MOST_SHOWN` values in all; a value counts every time it
    occurs."""
    waiting, count = [value], 0
    while waiting and count <= _MOST_SHOWN:
        inner = waiting.pop()
        if type(inner) is dict:
            waiting += inner.values()
        elif type(inner) is list or type(inner) is tuple:
            waiting += inner
        count += 1
    return count > _MOST_SHOWN


def number(value: float, *, signed: bool = False) -> str:
    """A measured value as text: with three decimals below 10, two below 100, and none above that; `-` for NaN.

    >>> [number(x) for x in (float("nan"), 0.5, 12.346, 786.23, 1234.5, -0.0002)], number(0.25, signed=True)
    (['-', '0.500', '12.35', '786', '1,234', '-0.000'], '+0.250')
    """
    if math.isnan(value):
        return "-"
    places = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 0
    return f"{value:{'+' if signed else ''},.{places}f}"


def counted(count: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> counted(1, "episode"), counted(1200, "episode"), counted(0, "batch", "batches")
    ('1 episode', '1,200 episodes', '0 batches')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def numbered(name: str, taken: Container[str]) -> str:
    """The name itself, or, if it is taken, the name with the first free number, starting at 2.

    >>> numbered("rule", ()), numbered("rule", ("rule", "rule_2"))
    ('rule', 'rule_3')
    """
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def first_of(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> first_of(["a", "b", "c"], 3), first_of(["a", "b", "c"], 1)
    ('a, b, c', 'a and 2 more')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(found: str, expected: Iterable[str]) -> str:
    """`; did you mean "x"?`, or an empty string if no name is close."""
    near = difflib.get_close_matches(found, list(expected), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def end_of_file(path: Path, *, since: int = 0, most: int = 2**20) -> list[str]:
    """The last lines of a text file, without reading the rest of it.

    Args:
        path: The file.
        since: Number of bytes to skip at the beginning.
        most: Maximum number of bytes to read from the end; a line that begins before these bytes is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = max(since, size - most)
        # The byte before is read as well: it tells whether the first line is complete.
        file.seek(max(0, begin - 1))
        before, data = (file.read(1) if begin else b""), file.read(most)
    if begin > since and before != b"\n":
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace").splitlines()


def printable(text: str) -> str:
    r"""The text with every control character except tab and newline escaped, so that a terminal shows these characters
    instead of acting on them.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, with ranges.

    >>> ranges([2, 4, 5, 6])
    '2, 4-6'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
