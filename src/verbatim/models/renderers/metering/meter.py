"""Limits what one rendering may spend: steps, characters that it makes, and processor time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

STEPS, STEPS_PER_VALUE, STEPS_PER_CHARACTER = 100_000, 5_000, 10
"""Nodes of the template's tree that may be evaluated: at least, for each value that is rendered (a message has some),
and for each of its characters. Published templates need some hundred for a message."""
CHARACTERS, COPIES = 4_000_000, 64
"""Characters that a template may make: at least, and how often it may copy all rendered text; once more for each
message."""
OUTPUT, OUTPUT_PER_VALUE, OUTPUT_PER_CHARACTER = 100_000, 2_000, 16
"""Characters of what is written: at least, for each value, and for each character."""
SECONDS = 5.0
"""Processor time of one rendering."""
MAX_DEPTH = 200
"""Levels of lists in lists: what Python does with them is recursive."""
_SCANNED = 8
"""2 ** this many characters are looked at in the time of one step."""
_SLICE = 50_000
"""Steps between two looks at the clock."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
"""Types whose members are gone through; dicts apart."""


class Overrun(Exception):
    """The budget is spent."""


class Meter:
    """The budget of one rendering. Steps and characters are counted, so the same rendering always ends alike; the
    time is for what takes long all the same. Whatever counts raises `Overrun` when it is too much."""

    __slots__ = ("_rest", "_sizes", "_until", "left", "output", "room")

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self.left = 0
        """Steps until the next look at the clock."""
        self._rest = STEPS
        self.room = CHARACTERS
        """Characters that may still be made."""
        self.output = OUTPUT
        """Characters that may still be written."""
        self._until = time.thread_time() + SECONDS

    def given(self, *values: Any, copies: int = 0) -> list[Any]:
        """The values as a template may see them, which are rendered with this budget: in JSON's own types, so that no
        method of another object can be called. Anything else is shown by its type's name, as `transformers` does.

        The more there is to render, the larger is the budget; `copies` is how often more than `COPIES` all text may be
        made anew.
        """
        plain = [self._plain(value) for value in values]
        items = sum(self.size(value)[0] for value in plain)
        characters = sum(self.size(value)[1] for value in plain)
        self._rest += STEPS_PER_VALUE * items + STEPS_PER_CHARACTER * characters
        self.room += (COPIES + copies) * characters
        self.output += OUTPUT_PER_VALUE * items + OUTPUT_PER_CHARACTER * characters
        return plain

    def step(self, steps: int) -> None:
        """Count what is about to be done."""
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
        """Count text before it is made."""
        self.room -= characters
        if self.room < 0:
            raise Overrun("it makes too much text")
        if characters >> _SCANNED:
            self.step(characters >> _SCANNED)

    def look(self, *values: Any, times: int = 1) -> None:
        """Count values that are looked at as a whole: compared, sorted, used as keys."""
        for value in values:
            if type(value) is str:
                if len(value) * times >> _SCANNED:
                    self.step(len(value) * times >> _SCANNED)
            elif type(value) not in _SCALARS:
                items, characters = self.size(value)
                self.step(items * times + (characters * times >> _SCANNED))

    def write(self, value: Any) -> None:
        """Count the text of a value before it is made."""
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
        """A result, counted after it was made: for what cannot be much larger than what it was made of."""
        if isinstance(value, (str, bytes)):
            self.make(len(value))
        elif isinstance(value, (list, tuple)):
            self.step(len(value))
        elif type(value) is GeneratorType:
            return self.counted(value)
        return value

    def whole(self, pieces: Iterable[str]) -> str:
        """All that the template writes."""
        written = []
        for piece in pieces:
            self.output -= len(piece)
            if self.output < 0:
                raise Overrun("it writes too much")
            written.append(piece)
        return "".join(written)

    def counted(self, items: Any, steps: int = 1, characters: int = 0) -> Any:
        """What a loop goes through: all rounds counted at once where it is known how many there will be."""
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
        """(items, characters) of a value, as often as they would be written. What is shared is counted each time, at
        the price of a walk; what was given is known."""
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
        else:  # a method is written with what it is of
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
        self.left += len(plain)  # what is given is measured at no cost
        self._sizes[id(plain)] = self.size(plain)
        return plain

    def _of_another_type(self, value: Any) -> Any:
        # Subclasses have methods of their own.
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # numpy's scalars
            return self._plain(value.item())
        return f"<{type(value).__name__}>"
