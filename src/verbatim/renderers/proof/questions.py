"""Yes or no: what is known of unknown values is answered, everything else is asked of an oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verbatim.renderers.proof.symbolic import (
    UNDEFINED,
    Bounds,
    Linear,
    Oracle,
    Term,
    contains,
    is_text,
    largest,
    minus,
    smallest,
)
from verbatim.renderers.proof.values import (
    Entry,
    Loop,
    Messages,
    NotUnderstood,
    Perhaps,
    Place,
    Positions,
    Raises,
    Routine,
    Space,
    is_lazy,
)


@dataclass(eq=False)
class Questions:
    """What can be asked about values in one run of a template."""

    number: int
    """Which of the runs that are compared."""
    tag: str
    """Marks values that another run need not share; empty where all is shared."""
    oracle: Oracle
    length: Linear | int
    """How many messages there are."""
    bounds: Bounds
    markers: frozenset[str]
    """What plain texts do not hold."""
    spaces: dict[Place, Any] = field(default_factory=dict, kw_only=True)
    """Every namespace attribute."""
    line: int = field(default=1, kw_only=True)
    """Of the template, where the run is."""

    def term(self, op: str, *values: Any) -> Term:
        """What comes of values of which nothing more is known than that it follows from them.

        Raises:
            NotUnderstood: it may follow from more than is in them.
        """
        return Term(op, tuple(map(self._closed, values)))

    def is_a(self, name: str, value: Any, arguments: list[Any]) -> bool:
        opposite = {"undefined": "defined"}.get(name)
        if opposite:
            return not self.is_a(opposite, value, arguments)
        if name in ("equalto", "==", "eq"):
            return self.compare("eq", value, arguments[0])
        known = _kinds(value)
        if known is not None and name in _KINDS:
            return name in known
        if name in ("true", "false") and (known is not None or isinstance(value, bool)):
            return value is (name == "true")
        return self.oracle.decide(self.term("is", name, value, *arguments))

    def _string(self, value: Any) -> Any:
        if is_text(value):
            return value
        if value is UNDEFINED:
            return ""
        if value is None or isinstance(value, (bool, int, float)):
            return str(value)
        return self.term("string", "of", value)

    def truth(self, value: Any) -> bool:
        """Whether a value counts as true."""
        if value is UNDEFINED:
            return False
        if isinstance(value, Term) and _never_empty(value):
            return True
        if isinstance(value, Messages):
            return self.compare("gt", minus(self.length, value.start), 0)
        if isinstance(value, Linear):
            return not self.compare("eq", value, 0)
        if isinstance(value, Term):
            if value.op == "length":
                return self.truth(value.args[0])
            if value.op in ("some", "word"):
                return True
            return self.oracle.decide(self.term("true", value))
        return bool(value) if isinstance(value, (str, int, float, tuple, type(None))) else True

    def compare(self, op: str, a: Any, b: Any) -> bool:
        """The answer to a comparison."""
        if op in ("ne", "notin"):
            return not self.compare("eq" if op == "ne" else "in", a, b)
        if op == "in":
            return self._in(a, b)
        if isinstance(a, (int, Linear)) and isinstance(b, (int, Linear)):
            return self._ordered(op, minus(a, b))
        if op == "gt" and b == 0 and isinstance(a, Term) and a.op == "length":
            return self.truth(a.args[0])
        if op == "eq":
            return self._equal(a, b)
        if op in ("gteq", "lteq"):
            return not self.compare("lt" if op == "gteq" else "gt", a, b)
        if op == "gt":
            a, b = b, a
        if all(isinstance(value, (int, float)) for value in (a, b)) or all(isinstance(value, str) for value in (a, b)):
            return bool(a < b)
        return self.oracle.decide(self.term("lt", a, b))

    def _ordered(self, op: str, difference: Linear | int) -> bool:
        if op in ("gt", "gteq"):
            op, difference = {"gt": "lt", "gteq": "lteq"}[op], minus(0, difference)
        if op == "lteq":
            op, difference = "lt", minus(difference, 1)
        most, least = largest(difference, self.bounds), smallest(difference, self.bounds)
        if op == "lt":
            if most is not None and most < 0:
                return True
            if least is not None and least >= 0:
                return False
            # The same question in one form, so that it gets one answer.
            if least == -1:
                return self._ordered("eq", minus(difference, -1))
            if most == 0:
                return not self._ordered("eq", difference)
        else:
            if difference == 0:
                return True
            if (most is not None and most < 0) or (least is not None and least > 0):
                return False
        return self.oracle.decide(Term(op, (difference,)))

    def _equal(self, a: Any, b: Any) -> bool:
        if isinstance(a, _PLAINLY_KNOWN) and isinstance(b, _PLAINLY_KNOWN):
            return bool(a == b)
        if isinstance(a, Term) and a.op == "cat" and b == "":
            return not self.truth(a)
        if isinstance(a, (Term, Entry)) and a == b and not is_lazy(a):
            return True
        kinds = [_kinds(value) for value in (a, b)]
        numbers = any(isinstance(value, (int, float, Linear)) for value in (a, b))
        if None not in kinds and kinds[0] != kinds[1] and not numbers:
            return False
        if is_text(a) and b == "":
            return not self.truth(a)
        first, second = sorted(map(self._closed, (a, b)), key=repr)
        return self.oracle.decide(Term("eq", (first, second)))

    def _in(self, item: Any, whole: Any) -> bool:
        if whole is UNDEFINED:
            return False
        if whole is None:
            raise Raises
        if isinstance(whole, tuple):
            return any([self.compare("eq", item, member) for member in whole])
        if isinstance(whole, Entry) and isinstance(item, str):
            value = whole.read(item)
            if value is UNDEFINED:
                return False
            return self.oracle.decide(self.term("has", value)) if may_lack(value) else True
        if isinstance(item, str) and is_text(whole):
            answer = contains(whole, item, item in self.markers)
            if answer is not None:
                return answer
        return self.oracle.decide(self.term("in", item, whole))

    def settle(self, places: set[Place]) -> None:
        """Ask now whether these attributes were assigned."""
        for place in sorted(places & self.spaces.keys()):
            self.spaces[place] = self._assigned(self.spaces[place])

    def _assigned(self, value: Any) -> Any:
        while isinstance(value, Perhaps):
            value = value.assigned if self.oracle.decide(value.question) else value.before
        return value

    def _own(self, value: Any) -> Term:
        return Term("messages", (self.tag, self.length, value))

    def _closed(self, value: Any) -> Any:
        """The value with everything in it that a result may follow from."""
        if isinstance(value, (Messages, Positions)):
            return self._own(value)
        if isinstance(value, tuple):
            return tuple(map(self._closed, value))
        if isinstance(value, (Space, Loop, Routine)):
            what = {Space: "a namespace", Loop: "`loop`", Routine: "a macro"}[type(value)]
            raise NotUnderstood(self.line, f"{what} as a value")
        return value

    def _state(self, space: Space) -> tuple[tuple[str, Any], ...]:
        """Everything in a namespace."""
        names = sorted(name for number, name in self.spaces if number == space.number)
        return tuple((name, self._held(self.spaces[space.number, name])) for name in names)

    def _held(self, value: Any) -> Any:
        if isinstance(value, Perhaps):
            return Perhaps(value.question, self._held(value.assigned), self._held(value.before))
        return self._closed(value)


_PLAINLY_KNOWN = (str, int, float, type(None))
_KINDS = frozenset({"defined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "integer"})


def _kinds(value: Any) -> frozenset[str] | None:
    """Which of Jinja's type tests a value passes; None: not known."""
    if value is UNDEFINED:
        return frozenset({"iterable", "sequence"})
    if is_text(value):
        return frozenset({"defined", "string", "iterable", "sequence"})
    if value is None:
        return frozenset({"defined", "none"})
    if isinstance(value, bool):
        return frozenset({"defined", "boolean", "number"})
    if isinstance(value, (int, Linear)):
        return frozenset({"defined", "number", "integer"})
    if isinstance(value, Entry):
        return frozenset({"defined", "mapping", "iterable", "sequence"})
    if isinstance(value, (tuple, Messages)) or (isinstance(value, Term) and value.op == "some"):
        return frozenset({"defined", "iterable", "sequence"})
    if isinstance(value, (Space, Loop, Routine)):
        return frozenset({"defined"})
    return None


def _never_empty(text: Term) -> bool:
    """Whether a text has known pieces that make it true, even stripped."""
    if text.op == "string" and text.args[0] == "strip" and len(text.args) == 2:
        inner = text.args[1]
        return isinstance(inner, Term) and inner.op == "cat" and any(
            isinstance(piece, str) and piece.strip() for piece in inner.args
        )  # fmt: skip
    return text.op == "cat" and any(isinstance(piece, str) for piece in text.args)


def may_lack(value: Any) -> bool:
    """Whether a message may be without this field."""
    return isinstance(value, Term) and value.op == "field"
