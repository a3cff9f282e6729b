"""Values that are not known: terms, indices of messages, and texts of which only some pieces are known.

Two terms that are equal stand for the same value, whatever it is. A yes-or-no question about a term that nothing
known answers is asked of an `Oracle`; `explore` runs a function once for every way in which the questions it asks
could be answered. What holds in every run holds for all values.

Example: `cat(("<a>", Term("text", ("h",)), "</a>"))` is `<a>`, some text, `</a>`. Whether it contains `<a>` is known
(yes); whether it is empty is known (no); whether it contains `x` is asked, unless `h` is known to be plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from verbatim.renderers.metering.meter import Meter


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An unknown value: what was done (`op`) to what (`args`)."""

    op: str
    args: tuple[Any, ...]
    _hash: int = field(init=False, repr=False)
    size: int = field(init=False, repr=False)
    """Terms and characters in it, those that it shares counted each time: what comparing it may take."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", size_of(self.args))
        # Terms are keys everywhere, and deep.
        object.__setattr__(self, "_hash", hash((self.op, self.args)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Term) and self._hash == other._hash and (self.op, self.args) == (other.op, other.args)


MOST_SIZE = 100_000
"""Size of the largest value: a template can double one in each round of a loop."""


def size_of(value: object) -> int:
    """How large a value is, as `Term.size` counts.

    Raises:
        TooManyPaths: too large to be compared.
    """
    size = 1
    if isinstance(value, Term):
        size += value.size
    elif isinstance(value, str):
        size += len(value) >> 6
    elif isinstance(value, (tuple, frozenset)):
        size += sum(map(size_of, value))
    if size > MOST_SIZE:
        raise TooManyPaths
    return size


@dataclass(frozen=True, slots=True)
class Linear:
    """A whole number that is a sum of unknown ones, such as "the number of messages - 1"."""

    constant: int
    parts: tuple[tuple[Symbol, int], ...]
    """(symbol, how many times), sorted, never 0 times."""

    def __add__(self, other: Linear | int) -> Linear | int:
        if isinstance(other, int):
            return Linear(self.constant + other, self.parts)
        counts = dict(self.parts)
        for symbol, times in other.parts:
            counts[symbol] = counts.get(symbol, 0) + times
        return linear(self.constant + other.constant, counts)

    def __neg__(self) -> Linear:
        return Linear(-self.constant, tuple((symbol, -times) for symbol, times in self.parts))


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """An unknown whole number between bounds that may themselves be unknown."""

    name: str
    rank: int = 0
    """Bounds of a symbol are made of symbols of lower rank."""


Bounds = Mapping[Symbol, tuple["Linear | int", "Linear | int | None"]]
"""Symbol to (smallest, largest or None: no bound)."""


def linear(constant: int, counts: Mapping[Symbol, int]) -> Linear | int:
    """A sum; a plain number where nothing in it is unknown."""
    parts = tuple(sorted((symbol, times) for symbol, times in counts.items() if times))
    return Linear(constant, parts) if parts else constant


def minus(a: Linear | int, b: Linear | int) -> Linear | int:
    """a - b."""
    if isinstance(a, int):
        return a - b if isinstance(b, int) else -b + a
    return a + (-b)


def largest(value: Linear | int, bounds: Bounds) -> int | None:
    """The most it can be, or None where there is no bound."""
    while isinstance(value, Linear):
        symbol, times = max(value.parts, key=lambda part: part[0].rank)
        low, high = bounds[symbol]
        bound = high if times > 0 else low
        if bound is None:
            return None
        rest: Linear | int = linear(value.constant, {s: t for s, t in value.parts if s != symbol})
        value = minus(rest, _times(bound, -times))
    return value


def _times(value: Linear | int, number: int) -> Linear | int:
    if isinstance(value, int):
        return value * number
    return linear(value.constant * number, {symbol: times * number for symbol, times in value.parts})


def smallest(value: Linear | int, bounds: Bounds) -> int | None:
    """The least it can be, or None where there is no bound."""
    most = largest(minus(0, value), bounds)
    return None if most is None else -most


UNDEFINED = Term("undefined", ())
_TEXTS = frozenset({"text", "plain", "word", "cat", "string"})


def is_text(value: object) -> bool:
    """Whether a value is text, known or not."""
    return isinstance(value, str) or (isinstance(value, Term) and value.op in _TEXTS)


def pieces(text: Any) -> tuple[Any, ...]:
    """Known and unknown pieces, in order."""
    return text.args if isinstance(text, Term) and text.op == "cat" else (text,)


def cat(parts: tuple[Any, ...]) -> Any:
    """Texts one after the other: known neighbours joined, nothing empty between."""
    flat: list[Any] = []
    for part in parts:
        for piece in pieces(part):
            if isinstance(piece, str) and flat and isinstance(flat[-1], str):
                flat[-1] += piece
            elif piece != "":
                flat.append(piece)
    if not flat:
        return ""
    if len(flat) == 1 and is_text(flat[0]):
        return flat[0]
    return Term("cat", tuple(flat))


def is_plain(text: Any) -> bool:
    """Whether none of its unknown pieces can hold a marker that the template looks for."""
    return all(isinstance(piece, str) or (isinstance(piece, Term) and piece.op == "plain") for piece in pieces(text))


def contains(text: Any, marker: str, plain: bool) -> bool | None:
    """Whether a marker is in a text; None: not known. `plain`: it is in no plain text."""
    known = [piece for piece in pieces(text) if isinstance(piece, str)]
    if any(marker in piece for piece in known):
        return True
    return False if plain and is_plain(text) and not _may_straddle(text, marker) else None


def starts(text: Any, marker: str, plain: bool, at_end: bool = False) -> bool | None:
    """Whether a text begins (or ends) with a marker; None: not known. `plain`: it is in no plain text."""
    edge = pieces(text)[-1 if at_end else 0]
    if isinstance(edge, str):
        if edge.endswith(marker) if at_end else edge.startswith(marker):
            return True
        if not (marker.endswith(edge) if at_end else marker.startswith(edge)):
            return False
    return False if contains(text, marker, plain) is False else None


def split(text: Any, marker: str) -> tuple[Any, ...] | None:
    """The texts between markers that are in no plain text; None: not known."""
    if not is_plain(text) or _may_straddle(text, marker):
        return None
    found: list[list[Any]] = [[]]
    for piece in pieces(text):
        first, *rest = piece.split(marker) if isinstance(piece, str) else (piece,)
        found[-1].append(first)
        found += [[part] for part in rest]
    return tuple(cat(tuple(parts)) for parts in found)


def _may_straddle(text: Any, marker: str) -> bool:
    """Whether a known and an unknown piece, or two unknown ones, could form the marker between them."""
    parts = pieces(text)
    for a, b in pairwise(parts):
        if not isinstance(a, str) and not isinstance(b, str):
            return len(marker) > 1
        cuts = range(1, len(marker))
        if isinstance(a, str) and any(a.endswith(marker[:cut]) or marker[:cut].endswith(a) for cut in cuts):
            return True
        if isinstance(b, str) and any(b.startswith(marker[cut:]) or marker[cut:].startswith(b) for cut in cuts):
            return True
    return False


class TooManyPaths(Exception):
    """There are more ways through the template than would be looked at."""


ALLOWED: ContextVar[Meter] = ContextVar("ALLOWED")
"""How much the proof that is being made may do; counted, not timed, so that the same template always has the same
proof."""


class Oracle:
    """Answers the questions of one run: as told, and "yes" where nothing was told."""

    def __init__(self, told: Mapping[Term, bool]) -> None:
        self.answers = dict(told)
        self.asked: list[Term] = []
        self.meter = ALLOWED.get()

    def decide(self, question: Term) -> bool:
        """The answer; the same question always gets the same one."""
        if question not in self.answers:
            self.answers[question] = True
            self.asked.append(question)
        return self.answers[question]


class Impossible(Exception):
    """These answers cannot all be true, or nothing has to be shown for them."""


def explore(run: Callable[[Oracle], None], told: Mapping[Term, bool], limit: int = 4_000) -> None:
    """Call `run` once for each way to answer what it asks, given what was told."""
    for number, _ in enumerate(_answers(run, told)):
        if number > limit:
            raise TooManyPaths


def _answers(run: Callable[[Oracle], None], told: Mapping[Term, bool]) -> Iterator[Mapping[Term, bool]]:
    waiting = [dict(told)]
    while waiting:
        before = waiting.pop()
        oracle = Oracle(before)
        with suppress(Impossible):
            run(oracle)
        for question in oracle.asked:
            waiting.append({**before, question: False})
            before = {**before, question: True}
        yield oracle.answers
