"""What a template has in its hands besides texts and numbers: messages, loops, namespaces, macros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import nodes

from verbatim.renderers.proof.symbolic import UNDEFINED, Linear, Term

Place = tuple[int, str]
"""A namespace attribute: (namespace, attribute)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message: fields that are known by name; `rest` says whether it may have others."""

    name: str
    fields: tuple[tuple[str, Any], ...]
    rest: bool = True

    def read(self, key: str) -> Any:
        """A field's value."""
        for name, value in self.fields:
            if name == key:
                return value
        return Term("field", (self.name, key)) if self.rest else UNDEFINED


@dataclass(frozen=True, slots=True)
class Messages:
    """The list of messages from `start` on, or that list reversed."""

    start: int = 0
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Positions:
    """`range(messages | length)`, of `Messages(start)`."""

    start: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """A `namespace(...)`."""

    number: int


@dataclass(frozen=True, slots=True)
class Perhaps:
    """A namespace attribute that may have been assigned; asked only when it is read."""

    question: Term
    assigned: Any
    before: Any


@dataclass(frozen=True, slots=True)
class Loop:
    """The variable `loop`."""

    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Routine:
    """A macro."""

    node: nodes.Macro


class Raises(Exception):
    """The template refuses here."""


class NotUnderstood(Exception):
    """A statement that this interpreter does not know."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: {what}")
        self.line = line
        self.what = what


def is_lazy(value: object) -> bool:
    """Whether a value can be gone through only once: what filters such as `map` give."""
    return isinstance(value, Term) and value.op == "lazy"


class Break(Exception):
    """The loop ends here."""


@dataclass
class Here:
    """Which message a loop is at, and its neighbours."""

    index: Linear | int
    """In the whole list."""
    before: Any
    """The message before, or `UNDEFINED`."""
    current: Any
    after: Any


class Continue(Exception):
    """The round ends here."""
