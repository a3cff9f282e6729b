"""What a template's expressions give on unknown messages.

Whatever is not about which message is where is not looked into: a filter, a call becomes a term of everything it may
read. That is always right, since the same things read give the same result; it only knows less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import nodes

from verbatim.renderers.proof.names import Uses, uses
from verbatim.renderers.proof.questions import Questions, may_lack
from verbatim.renderers.proof.symbolic import (
    MOST_SIZE,
    UNDEFINED,
    Linear,
    Term,
    cat,
    is_text,
    minus,
    size_of,
    split,
    starts,
)
from verbatim.renderers.proof.values import (
    Entry,
    Here,
    Loop,
    Messages,
    NotUnderstood,
    Place,
    Positions,
    Raises,
    Routine,
    Space,
    is_lazy,
)

GLOBALS = ("range", "namespace", "raise_exception", "strftime_now", "dict", "cycler", "joiner", "lipsum")
_SPECIAL = frozenset({"self", "super", "caller", "varargs", "kwargs"})
_LONG = 64
_STATEFUL = frozenset({"cycler", "joiner", "lipsum", "random"})
_PURE = frozenset({"strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "startswith", "endswith",
                   "split", "replace", "removeprefix", "removesuffix", "join"})  # fmt: skip
_LAZY = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "unique", "slice", "batch", "reverse", "items"}
)
"""Filters whose result can be gone through once."""
_PYTHON: dict[type, type] = {Entry: dict, str: str, int: int, bool: bool, float: float, tuple: list}
_NO_TEXTS = (int, float, Linear, tuple, Entry, Messages, Positions, Space, Loop, Routine)
_TO_TEXT = frozenset({"tojson", "string", "join", "upper", "lower", "replace", "capitalize", "trim", "title"})


@dataclass(eq=False)
class Expressions(Questions):
    """The expressions of one run."""

    scopes: list[dict[str, Any]]
    """Names and their values, innermost last."""
    num_spaces: int = 0
    assigned: set[Place] = field(default_factory=set)
    """Places of `spaces` that were assigned."""
    out: list[tuple[Any, int]] = field(default_factory=list)
    """(text, line), in order."""
    trace: list[tuple[int, bool]] = field(default_factory=list)
    """(line, answer) of every test."""
    here: Here | None = None
    depth: int = 0

    def run(self, body: Sequence[nodes.Node]) -> None:
        """Execute statements."""
        raise NotImplementedError

    def value(self, node: nodes.Node) -> Any:
        """What an expression gives."""
        rule = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if rule is None:
            raise NotUnderstood(node.lineno, f"a {type(node).__name__} expression")
        self.line = node.lineno
        self.oracle.meter.step(1)
        return rule(node)

    def _of_const(self, node: nodes.Const) -> Any:
        return node.value

    def _of_templatedata(self, node: nodes.TemplateData) -> Any:
        return node.data

    def _of_name(self, node: nodes.Name) -> Any:
        if node.name in _SPECIAL and self._lookup(node.name) is UNDEFINED:
            raise NotUnderstood(node.lineno, node.name)
        return self._lookup(node.name)

    def _of_list(self, node: nodes.List) -> Any:
        return self._bounded(tuple(self._kept(self.value(item)) for item in node.items))

    _of_tuple = _of_list

    def _of_dict(self, node: nodes.Dict) -> Any:
        pairs = ((self.value(pair.key), self._kept(self.value(pair.value))) for pair in node.items)
        return self.term("dict", *pairs)

    def _of_condexpr(self, node: nodes.CondExpr) -> Any:
        if self._test(node.test):
            return self.value(node.expr1)
        return UNDEFINED if node.expr2 is None else self.value(node.expr2)

    def _of_and(self, node: nodes.And) -> Any:
        left = self.value(node.left)
        return self.value(node.right) if self.truth(left) else left

    def _of_or(self, node: nodes.Or) -> Any:
        left = self.value(node.left)
        return left if self.truth(left) else self.value(node.right)

    def _of_not(self, node: nodes.Not) -> Any:
        return not self.truth(self.value(node.node))

    def _of_neg(self, node: nodes.Neg) -> Any:
        value = self.value(node.node)
        return minus(0, value) if isinstance(value, (int, Linear)) else self.term("neg", value)

    def _of_compare(self, node: nodes.Compare) -> Any:
        left = self.value(node.expr)
        for operand in node.ops:
            right = self.value(operand.expr)
            if not self.compare(operand.op, left, right):
                return False
            left = right
        return True

    def _of_concat(self, node: nodes.Concat) -> Any:
        return self._bounded(cat(tuple(self._string(self.value(part)) for part in node.nodes)))

    def _of_add(self, node: nodes.Add) -> Any:
        a, b = self.value(node.left), self.value(node.right)
        if isinstance(a, (int, Linear)) and isinstance(b, (int, Linear)):
            return minus(a, minus(0, b))
        if isinstance(a, tuple) and isinstance(b, tuple):
            return self._bounded(a + b)
        if any(x is None or x is UNDEFINED or isinstance(x, _NO_TEXTS) for x in (a, b)) and any(map(is_text, (a, b))):
            raise Raises
        if is_text(a) or is_text(b):
            return self._bounded(cat((a, b)))
        return self.term("add", a, b)

    def _bounded(self, value: Any) -> Any:
        """A value that was put together, if it is not too large to be compared."""
        self.oracle.meter.step(size_of(value))
        return value

    def _of_sub(self, node: nodes.Sub) -> Any:
        a, b = self.value(node.left), self.value(node.right)
        if isinstance(a, (int, Linear)) and isinstance(b, (int, Linear)):
            return minus(a, b)
        return self.term("sub", a, b)

    def _of_mod(self, node: nodes.Mod) -> Any:
        a, b = self.value(node.left), self.value(node.right)
        if isinstance(a, int) and isinstance(b, int) and b:
            return a % b
        if isinstance(a, Linear) and b == 2:
            odd = sum(self.oracle.decide(Term("odd", (symbol,))) for symbol, times in a.parts if times % 2)
            return (a.constant + odd) % 2
        return self.term("mod", a, b)

    def _of_mul(self, node: nodes.BinExpr) -> Any:
        return self.term(type(node).__name__, self.value(node.left), self.value(node.right))

    _of_div = _of_floordiv = _of_pow = _of_mul

    def _of_nsref(self, node: nodes.NSRef) -> Any:
        return self.attribute(self._lookup(node.name), node.attr)

    def _of_getattr(self, node: nodes.Getattr) -> Any:
        whole = self.value(node.node)
        if hasattr(_PYTHON.get(type(whole), object), node.attr):
            # Jinja's `whole.attr` is an attribute of Python's before it is an item.
            raise NotUnderstood(node.lineno, f"the method {node.attr} as a value")
        return self.attribute(whole, node.attr)

    def _of_getitem(self, node: nodes.Getitem) -> Any:
        whole = self.value(node.node)
        if isinstance(node.arg, nodes.Slice):
            parts = (node.arg.start, node.arg.stop, node.arg.step)
            return self._slice(whole, [None if part is None else self.value(part) for part in parts])
        key = self.value(node.arg)
        if isinstance(whole, Messages):
            return self._message_at(whole, key)
        if isinstance(whole, Space) and not isinstance(node.arg, nodes.Const):
            raise NotUnderstood(node.lineno, "an attribute of a namespace whose name is computed")
        return self.attribute(whole, key)

    def _slice(self, whole: Any, bounds: list[Any]) -> Any:
        start, stop, step = bounds
        if isinstance(whole, Messages) and not whole.reverse and stop is None:
            if isinstance(start, int) and start >= 0 and step is None:
                return Messages(whole.start + start)
            if start is None and step == -1:
                return replace(whole, reverse=True)
        if isinstance(whole, (str, tuple)) and all(part is None or isinstance(part, int) for part in bounds):
            return whole[start:stop:step]
        return self.term("string" if is_text(whole) else "slice", whole, *bounds)

    def attribute(self, whole: Any, key: Any) -> Any:
        """`whole.key` or `whole[key]`."""
        if whole is UNDEFINED:
            raise Raises
        if isinstance(whole, Entry) and isinstance(key, str):
            return whole.read(key)
        if isinstance(whole, Space):
            if not isinstance(key, str):
                raise NotUnderstood(0, "an attribute of a namespace whose name is computed")
            return self._assigned(self.spaces.get((whole.number, key), UNDEFINED))
        if isinstance(whole, Loop):
            return dict(whole.fields).get(key, self._own(key))
        if isinstance(whole, tuple) and isinstance(key, int):
            return whole[key] if -len(whole) <= key < len(whole) else UNDEFINED
        if whole is None or isinstance(whole, (bool, int, str)):
            return self.term("get", whole, key) if isinstance(whole, str) else UNDEFINED
        return self.term("get", whole, key)

    def _message_at(self, whole: Messages, key: Any) -> Any:
        """The message at an index, where that is the current one or a neighbour."""
        if isinstance(key, int) and key < 0:
            return Entry(f"last{self._own(key)}", ())
        if not isinstance(key, (int, Linear)) or whole.reverse:
            return self.term("get", whole, key)
        index = minus(key, -whole.start)
        if self.here is not None and self.compare("lt", key, 0):
            return Entry(f"last{self._own(key)}", ())
        if self.here is not None:
            offset = minus(index, self.here.index)
            for step, message in ((0, self.here.current), (-1, self.here.before), (1, self.here.after)):
                if offset == step:
                    return message
        if index == 0:
            return self._lookup("messages:first")
        if isinstance(index, int) and self.compare("lt", index, self._lookup("messages:known")):
            return Entry(f"{index}{self.tag}", ())
        return Entry(f"at{self._own(index)}", ())

    # Calls, filters and tests

    def _of_call(self, node: nodes.Call) -> Any:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise NotUnderstood(node.lineno, "a call with * or **")
        if isinstance(node.node, nodes.Getattr):
            whole = self.value(node.node.node)
            arguments = [self.value(argument) for argument in node.args]
            return self._method(whole, node.node.attr, arguments, self._keywords(node.kwargs))
        arguments = [self.value(argument) for argument in node.args]
        keywords = self._keywords(node.kwargs)
        called = self.value(node.node)
        if isinstance(called, Routine):
            return self._call(called, [self._kept(argument, Space) for argument in arguments], dict(keywords))
        if called is UNDEFINED:
            raise Raises
        if not (isinstance(called, Term) and called.op == "global"):
            return self.term("call", called, *arguments, keywords)
        (name,) = called.args
        if name == "raise_exception":
            raise Raises
        if name == "namespace":
            self.num_spaces += 1
            for key, value in keywords:
                self.spaces[self.num_spaces, key] = value
            return Space(self.num_spaces)
        if name == "range":
            return self._range(arguments)
        if name in _STATEFUL:
            raise NotUnderstood(node.lineno, f"{name}(), which is different every time")
        return self.term("call", name, *arguments, keywords)

    def _keywords(self, pairs: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
        return tuple((pair.key, self._closed(self._kept(self.value(pair.value)))) for pair in pairs)

    def _range(self, arguments: list[Any]) -> Any:
        if all(isinstance(argument, int) for argument in arguments):
            numbers = range(*arguments)
            return tuple(numbers) if len(numbers) < _LONG else self.term("range", *arguments)
        if len(arguments) == 1 and isinstance(arguments[0], Linear):
            start = minus(self.length, arguments[0])
            if isinstance(start, int) and start >= 0:
                return Positions(start)
        return self.term("range", *arguments)

    def _call(self, routine: Routine, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        node = routine.node
        if keywords.keys() - {argument.name for argument in node.args} or uses([node]).names & _SPECIAL:
            raise NotUnderstood(node.lineno, "a macro with caller, varargs or kwargs")
        if self.depth > 8:
            part = uses([node])
            did = self.term("string", "macro", node.name, *arguments, tuple(keywords.items()), self._read(part.names))
            for place in self.places(part):
                self._assign(place, Term("macroset", (place, did)))
            return did
        names = [argument.name for argument in node.args]
        defaults = dict(zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True))
        local: dict[str, Any] = {}
        before, self.scopes = self.scopes, [self.scopes[0], local]
        self.depth += 1
        try:
            for number, name in enumerate(names):
                if number < len(arguments):
                    local[name] = arguments[number]
                elif name in keywords:
                    local[name] = keywords[name]
                else:
                    local[name] = self._kept(self.value(defaults[name])) if name in defaults else UNDEFINED
            return self._captured(node.body)
        finally:
            self.scopes = before
            self.depth -= 1

    def _method(self, whole: Any, name: str, arguments: list[Any], keywords: tuple[tuple[str, Any], ...]) -> Any:
        if whole is UNDEFINED or whole is None:
            raise Raises
        if isinstance(whole, Entry) and name == "get" and arguments and isinstance(arguments[0], str):
            value = whole.read(arguments[0])
            if value is UNDEFINED:
                return arguments[1] if len(arguments) > 1 else None
            return self.term("get", value, *arguments[1:]) if may_lack(value) else value
        marker = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], str) else None
        if is_text(whole) and not keywords:
            if isinstance(whole, str) and name in _PURE and all(isinstance(a, (str, int)) for a in arguments):
                if (len(whole) + 1) * sum(len(a) for a in arguments if isinstance(a, str)) > MOST_SIZE:
                    return self.term("string", name, whole, *arguments)
                found = getattr(whole, name)(*arguments)
                return tuple(found) if isinstance(found, list) else found
            if name == "split" and marker:
                parts = split(whole, marker) if marker in self.markers else None
                return self.term("split", whole, marker) if parts is None else parts
            if name in ("startswith", "endswith") and marker is not None:
                answer = starts(whole, marker, marker in self.markers, at_end=name == "endswith")
                return self.oracle.decide(Term(name, (whole, marker))) if answer is None else answer
            if name in ("strip", "lstrip", "rstrip"):
                return _stripped(whole, name, tuple(map(self._closed, arguments)))
            if name in ("lower", "upper", "capitalize", "title", "replace", "removeprefix", "removesuffix"):
                return self.term("string", name, whole, *arguments)
        return self.term("call", whole, name, *arguments, keywords)

    def _of_filter(self, node: nodes.Filter) -> Any:
        if node.node is None:
            raise NotUnderstood(node.lineno, "a filter block")
        value = self.value(node.node)
        arguments = [self.value(argument) for argument in node.args]
        keywords = self._keywords(node.kwargs)
        if node.name in _STATEFUL:
            raise NotUnderstood(node.lineno, f"the filter {node.name}, which is different every time")
        if node.name in ("length", "count"):
            return self._count(value)
        if node.name in ("default", "d") and not keywords:
            absent = self.is_a("undefined", value, [])
            return arguments[0] if absent or (arguments[1:] == [True] and not self.truth(value)) else value
        if node.name == "trim" and not arguments:
            return _stripped(self._string(value), "strip", ())
        if node.name in ("string", "safe") and is_text(value):
            return value
        if node.name in ("lower", "upper") and isinstance(value, str):
            return getattr(value, node.name)()
        op = "string" if node.name in _TO_TEXT else "lazy" if node.name in _LAZY else "filter"
        return self.term(op, node.name, value, *arguments, keywords)

    def _count(self, value: Any) -> Any:
        if isinstance(value, Messages):
            return minus(self.length, value.start)
        if isinstance(value, (str, tuple)):
            return len(value)
        if value is UNDEFINED:
            return 0
        return self.term("length", value)

    def _of_test(self, node: nodes.Test) -> Any:
        return self.is_a(node.name, self.value(node.node), [self.value(argument) for argument in node.args])

    def _test(self, node: nodes.Node) -> bool:
        answer = self.truth(self.value(node))
        self.trace.append((node.lineno, answer))
        return answer

    def _captured(self, body: Sequence[nodes.Node]) -> Any:
        before, self.out = self.out, []
        try:
            self.run(body)
            return self._bounded(cat(tuple(text for text, _ in self.out))) if self.out else ""
        finally:
            self.out = before

    def _read(self, names: frozenset[str]) -> tuple[Any, ...]:
        """The values behind names, and behind the names that macros among them read."""
        found: dict[str, Any] = {}
        waiting = sorted(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = value = self._lookup(name)
                if isinstance(value, Routine):
                    waiting += uses([value.node]).names
        return tuple((name, self._behind(value)) for name, value in sorted(found.items()))

    def _behind(self, value: Any) -> Any:
        if isinstance(value, Space):
            return self._state(value)
        return value.node.name if isinstance(value, Routine) else self._closed(value)

    def _kept(self, value: Any, *allowed: type) -> Any:
        """A value that is kept under another name, or in a list.

        Raises:
            NotUnderstood: it changes with time: a namespace, a loop, what can be gone through once; or is a macro.
        """
        if is_lazy(value) or (isinstance(value, (Space, Loop, Routine)) and not isinstance(value, allowed)):
            raise NotUnderstood(self.line, "a namespace, a macro, `loop` or a generator under another name")
        return value

    def places(self, part: Uses) -> set[Place]:
        """Every namespace attribute that a piece of the template may assign: (namespace, attribute)."""
        found: set[Place] = set()
        called: set[str] = set()
        waiting = [part]
        while waiting:
            part = waiting.pop()
            for name, attribute in part.attributes:
                space = self._lookup(name)
                if name == "*":
                    found |= {place for place in self.spaces if place[1] == attribute}
                elif isinstance(space, Space):
                    found.add((space.number, attribute))
            for name in part.names - called:
                called.add(name)
                routine = self._lookup(name)
                if isinstance(routine, Routine):
                    waiting.append(uses([routine.node]))
        return found

    # Scopes

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self.scopes.append({})
        try:
            yield
        finally:
            self.scopes.pop()

    def _lookup(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return UNDEFINED

    def _bind(self, target: nodes.Node, value: Any) -> None:
        if isinstance(target, nodes.Name):
            self.scopes[-1][target.name] = value
        elif isinstance(target, nodes.NSRef):
            space = self._lookup(target.name)
            if not isinstance(space, Space):
                raise NotUnderstood(target.lineno, f"{target.name} is not a namespace")
            self._assign((space.number, target.attr), value)
        elif isinstance(target, nodes.Tuple):
            for number, part in enumerate(target.items):
                self._bind(part, value[number] if isinstance(value, tuple) else Term("item", (value, number)))
        else:
            raise NotUnderstood(target.lineno, "an assignment")

    def _assign(self, place: Place, value: Any) -> None:
        self.spaces[place] = self._kept(value)
        self.assigned.add(place)


def _stripped(text: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    if isinstance(text, str):
        return getattr(text, name)(*arguments)
    # What is cut off a plain text leaves it plain.
    return Term("plain" if text.op == "plain" else "string", (name, text, *arguments))
