"""The budget of one rendering: steps, characters of text, and processor time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

STEPS, STEPS_PER_VALUE, STEPS_PER_CHARACTER = 100_000, 5_000, 10
"""Budget of steps (evaluated nodes of the template's syntax tree): a base amount, plus an amount per input value (a
message has several values) and an amount per input character. Published templates need a few hundred steps per
message."""
CHARACTERS, COPIES = 4_000_000, 64
"""Budget of characters in all strings that a template creates: a base amount, plus this many copies of the whole input
text. `Meter.given` adds one copy per message."""
OUTPUT, OUTPUT_PER_VALUE, OUTPUT_PER_CHARACTER = 100_000, 2_000, 16
"""Budget of characters in the result: a base amount, plus an amount per input value and an amount per input
character."""
SECONDS = 5.0
"""Processor time of one rendering, in seconds."""
MAX_DEPTH = 200
"""Maximum nesting of lists, because Python's own operations on lists are recursive."""
_SCANNED = 8
"""Scanning 2 ** _SCANNED characters is charged as one step."""
_SLICE = 50_000
"""Steps between two readings of the clock."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
"""Container types whose members are iterated over. Dicts are not included."""


class Overrun(Exception):
    """The budget is exhausted."""


class Meter:
    """The budget of one rendering. Methods that charge it raise `Overrun` when it is exhausted.

    Steps and characters are counted, so the same rendering always has the same outcome. The time limit is a safety net
    for operations that take longer than their counts suggest.
    """

    __slots__ = ("_rest", "_sizes", "_until", "left", "output", "room")

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self.left = 0
        """Number of steps left until the next reading of the clock."""
        self._rest = STEPS
        self.room = CHARACTERS
        """Number of characters that may still be created."""
        self.output = OUTPUT
        """Number of characters that may still be added to the result."""
        self._until = time.thread_time() + SECONDS

    def given(self, *values: Any, copies: int = 0) -> list[Any]:
        """The input values in a form that a template may see, with the budget raised according to their size.

        Values are converted to JSON's own types, so that a template cannot call methods of other objects. Any other
        value becomes its type's name. `copies` is the number of copies of the input text allowed beyond `COPIES`.
        """
        plain = [self._plain(value) for value in values]
        items = sum(self.size(value)[0] for value in plain)
        characters = sum(self.size(value)[1] for value in plain)
        self._rest += STEPS_PER_VALUE * items + STEPS_PER_CHARACTER * characters
        self.room += (COPIES + copies) * characters
        self.output += OUTPUT_PER_VALUE * items + OUTPUT_PER_CHARACTER * characters
        return plain

    def step(self, steps: int) -> None:
        """Charge steps before they are taken."""
        self.left -= steps
        if self.left < 0:
            if time.thread_time() > self._until:
                raise Overrun(f"it takes more than {SECONDS:g} s")
            wanted = min(max(_SLICE, -self.left), self._rest)
            self._rest -= wanted
            self.left += wanted
            if self.left < 0:
                raise Overrun("it takes too many steps")

    def make(self, characters: int) -> None:
        """Charge a string before it is created."""
        self.room -= characters
        if self.room < 0:
            raise Overrun("it makes too much text")
        if characters >> _SCANNED:
            self.step(characters >> _SCANNED)

    def look(self, *values: Any, times: int = 1) -> None:
        """Charge values that are scanned completely: compared, sorted, hashed."""
        for value in values:
            if type(value) is str:
                if len(value) * times >> _SCANNED:
                    self.step(len(value) * times >> _SCANNED)
            elif type(value) not in _SCALARS:
                items, characters = self.size(value)
                self.step(items * times + (characters * times >> _SCANNED))

    def write(self, value: Any) -> None:
        """Charge the text of a value before it is created."""
        if type(value) is str:
            if len(value) >> _SCANNED or len(value) > self.room:
                self.make(len(value))
            else:
                self.room -= len(value)
        elif type(value) not in _SCALARS:
            items, characters = self.size(value)
            self.step(items)
            self.make(characters + 16 * items)

    def made(self, value: Any) -> Any:
        """Charge a result after it is created, for operations whose result is not much larger than their input."""
        if isinstance(value, (str, bytes)):
            self.make(len(value))
        elif isinstance(value, (list, tuple)):
            self.step(len(value))
        elif type(value) is GeneratorType:
            return self.counted(value)
        return value

    def whole(self, pieces: Iterable[str]) -> str:
        """Join the pieces that the template writes, within the output budget."""
        written = []
        for piece in pieces:
            self.output -= len(piece)
            if self.output < 0:
                raise Overrun("it writes too much")
            written.append(piece)
        return "".join(written)

    def counted(self, items: Any, steps: int = 1, characters: int = 0) -> Any:
        """The items of a loop. If the number of rounds is known, all rounds are charged now; otherwise each round is
        charged when it begins."""
        try:
            rounds = len(items)
        except TypeError:
            return self._one_by_one(items, steps, characters)
        self.step(rounds * steps)
        self.make(rounds * characters)
        return items

    def _one_by_one(self, items: Any, steps: int, characters: int) -> Iterator[Any]:
        for item in items:
            self.step(steps)
            self.make(characters)
            self.look(item)
            yield item

    def size(self, value: Any, depth: int = 0) -> tuple[int, int]:
        """(items, characters) of a value as written; shared parts count each time they occur.

        Measuring is itself charged. The sizes of the input values are cached by `given`.
        """
        if isinstance(value, (str, bytes)):
            return 1, len(value)
        if id(value) in self._sizes:
            return self._sizes[id(value)]
        if depth > MAX_DEPTH:
            raise Overrun(f"it nests values deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            parts: Any = [*value, *value.values()]
        elif isinstance(value, _CONTAINERS):
            parts = value
        elif isinstance(value, range):
            return len(value), 8 * len(value)
        elif type(value) in _SCALARS:
            return 1, 8
        else:  # the text of a bound method contains that of its object
            of = getattr(value, "__self__", None)
            return (1, 64) if of is None else self.size(of, depth + 1)
        self.step(len(value))
        items = characters = 1
        for part in parts:
            if type(part) is str:
                items, characters = items + 1, characters + len(part)
            else:
                more = self._sizes.get(id(part)) or self.size(part, depth + 1)
                items, characters = items + more[0], characters + more[1]
        return items, characters

    def _plain(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        if isinstance(value, Mapping):
            plain: Any = {
                key if type(key) is str else self._plain(key): part if type(part) in _SCALARS else self._plain(part)
                for key, part in value.items()
            }
        elif isinstance(value, (list, tuple)):
            plain = [part if type(part) in _SCALARS else self._plain(part) for part in value]
            plain = plain if isinstance(value, list) else tuple(plain)
        else:
            return self._of_another_type(value)
        self.left += len(plain)  # refund what `size` has charged, because measuring the input is free
        self._sizes[id(plain)] = self.size(plain)
        return plain

    def _of_another_type(self, value: Any) -> Any:
        # Converted to the exact base type: subclasses may have methods of their own, which a template could call.
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # numpy's scalars
            return self._plain(value.item())
        return f"<{type(value).__name__}>"
