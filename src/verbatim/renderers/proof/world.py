"""A chat template run on messages that are not known: Jinja's statements over unknown values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from verbatim.renderers.proof.expressions import Expressions
from verbatim.renderers.proof.names import stored, uses
from verbatim.renderers.proof.symbolic import UNDEFINED, Linear, Oracle, Term
from verbatim.renderers.proof.values import (
    Break,
    Continue,
    Here,
    Loop,
    NotUnderstood,
    Raises,
    Routine,
    Space,
)


@dataclass(eq=False)
class World(Expressions):
    """One run of a template on unknown messages."""

    def copy(self, oracle: Oracle) -> World:
        """A world of its own that has come as far as this one, with nothing emitted."""
        return replace(
            self, oracle=oracle, scopes=[dict(scope) for scope in self.scopes], spaces=dict(self.spaces),
            assigned=set(), out=[], trace=[],
        )  # fmt: skip

    # Statements

    def run(self, body: Sequence[nodes.Node]) -> None:
        """Execute statements."""
        for node in body:
            statement = getattr(self, f"_do_{type(node).__name__.lower()}", None)
            if statement is None:
                raise NotUnderstood(node.lineno, f"a {type(node).__name__} statement")
            statement(node)

    def iterate(self, node: nodes.For, item: Any, loop: Loop, here: Here | None) -> None:
        """One round of a loop."""
        before, self.here = self.here, here
        with self._scope():
            self.scopes[-1]["loop"] = loop
            self._bind(node.target, item)
            try:
                self.run(node.body)
            except Continue:
                pass
            finally:
                self.here = before

    def _do_output(self, node: nodes.Output) -> None:
        for child in node.nodes:
            self._emit(child.data if isinstance(child, nodes.TemplateData) else self.value(child), child.lineno)

    def _emit(self, value: Any, line: int) -> None:
        text = self._string(value)
        if text != "":
            self.out.append((text, line))

    def _do_if(self, node: nodes.If) -> None:
        if self._test(node.test):
            self.run(node.body)
            return
        for branch in node.elif_:
            if self._test(branch.test):
                self.run(branch.body)
                return
        self.run(node.else_)

    def _do_assign(self, node: nodes.Assign) -> None:
        value = self.value(node.node)
        fresh = isinstance(node.node, nodes.Call)
        self._bind(node.target, self._kept(value, Space) if fresh else self._kept(value))

    def _do_assignblock(self, node: nodes.AssignBlock) -> None:
        if node.filter is not None:
            raise NotUnderstood(node.lineno, "a set block with a filter")
        with self._scope():
            value = self._captured(node.body)
        self._bind(node.target, value)

    def _do_exprstmt(self, node: nodes.ExprStmt) -> None:
        self.value(node.node)

    def _do_macro(self, node: nodes.Macro) -> None:
        if len(self.scopes) > 1:
            raise NotUnderstood(node.lineno, "a macro inside a loop")
        self.scopes[-1][node.name] = Routine(node)

    def _do_callblock(self, node: nodes.CallBlock) -> None:
        # {% generation %} only marks what is inside it.
        if not (isinstance(node.call, nodes.Call) and isinstance(node.call.node, nodes.ExtensionAttribute)):
            raise NotUnderstood(node.lineno, "a call block")
        with self._scope():
            self.run(node.body)

    def _do_break(self, node: nodes.Break) -> None:
        raise Break

    def _do_continue(self, node: nodes.Continue) -> None:
        raise Continue

    def _do_for(self, node: nodes.For) -> None:
        items = self.value(node.iter)
        if node.recursive:
            raise NotUnderstood(node.lineno, "a recursive loop")
        if items is UNDEFINED or items == ():
            self.run(node.else_)
        elif isinstance(items, tuple) and node.test is None:
            for number, item in enumerate(items):
                loop = Loop((("index0", number), ("index", number + 1), ("first", number == 0),
                             ("last", number == len(items) - 1), ("length", len(items))))  # fmt: skip
                try:
                    self.iterate(node, item, loop, self.here)
                except Break:
                    break
        else:
            if items is None or isinstance(items, (bool, int, Linear)):
                raise Raises
            self._opaque_loop(node, items)

    def _opaque_loop(self, node: nodes.For, items: Any) -> None:
        """What the loop reads decides what it does; nothing else is known."""
        tested = [] if node.test is None else [node.test]
        part = uses([*tested, *node.body], stored(node.target) | {"loop"}) | uses(node.else_)
        did = Term("loop", (id(node), self._closed(items), self._read(part.names)))
        for number, place in enumerate(sorted(self.places(part))):
            self._assign(place, Term("loopset", (number, place[1], did)))
        # Emitted even where the loop emits nothing: it may also raise.
        self.out.append((did, node.lineno))
