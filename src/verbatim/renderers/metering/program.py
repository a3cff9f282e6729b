"""Compiles a chat template so that it counts what it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

from verbatim.renderers.metering.environment import metered_environment
from verbatim.renderers.metering.filters import COMPARED, JOINED, KEY, ROUNDS, SIZED, SPEND


@lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    """The program of a template, counted. `chat_template.compile_template` adds the model's name to its errors.

    Before each loop all its rounds are counted, each by the size of the loop's body; a macro and a block by theirs when
    they begin. What else can take long or grow goes through the filters of `filters` and the environment's operators.
    """
    environment = metered_environment()
    tree: nodes.Template = _Counting().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)


_Body = nodes.Template | nodes.Block | nodes.Macro | nodes.CallBlock


class _Counting(NodeTransformer):
    """Puts the counting into a template's tree."""

    def visit_Template(self, node: nodes.Template) -> nodes.Node:
        """The template's own lines, once."""
        return self._begins(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        """As a macro: it may be called by its name."""
        return self._begins(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Its body, at each call."""
        return self._begins(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """Its body, whenever it is called back."""
        return self._begins(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """All its rounds, before the first."""
        tested = [] if node.test is None else [node.test]
        steps, characters = _weight([*node.body, *tested])
        self.generic_visit(node)
        if node.recursive:  # its rounds come from calls, too
            node.body.insert(0, _spend(steps, characters, node.lineno))
            steps = characters = 1
        node.iter = _filtered(node.iter, ROUNDS, nodes.Const(steps), nodes.Const(characters))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`~`."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Comparisons of what may be large; one with a word or a number of the template ends with that."""
        self.generic_visit(node)
        if len(node.ops) == 1:
            operand = node.ops[0]
            if operand.op in ("in", "notin"):
                small = isinstance(operand.expr, (nodes.List, nodes.Tuple)) and all(
                    isinstance(item, nodes.Const) for item in operand.expr.items
                )
            else:
                small = isinstance(node.expr, nodes.Const) or isinstance(operand.expr, nodes.Const)
            if small:
                return node
        parts = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _filtered(node.expr, COMPARED, *parts)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Slices, which copy."""
        self.generic_visit(node)
        return _filtered(node, SIZED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Keys, which are looked at as a whole."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, KEY)
        return node

    def _begins(self, node: _Body) -> nodes.Node:
        steps, characters = _weight(node.body)
        self.generic_visit(node)
        if steps > 1 or characters:
            node.body.insert(0, _spend(steps, characters, node.lineno))
        return node


_APART = (nodes.Macro, nodes.CallBlock, nodes.Block)
"""Their bodies are counted when they begin."""


def _weight(parts: Sequence[Any]) -> tuple[int, int]:
    """(nodes, characters of plain text) of statements and expressions, less what is counted by itself."""
    steps, characters = 1, 0  # a round of nothing takes time, too
    waiting = list(parts)
    while waiting:
        node = waiting.pop()
        steps += 1
        if isinstance(node, nodes.TemplateData):
            characters += len(node.data)
        elif isinstance(node, nodes.For):
            waiting += [node.iter, *node.else_]
        elif isinstance(node, _APART):
            waiting += [child for field in node.fields if field != "body" for child in _children(node, field)]
        else:
            waiting += node.iter_child_nodes()
    return steps, characters


def _children(node: nodes.Node, field: str) -> list[nodes.Node]:
    value = getattr(node, field)
    return [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, nodes.Node)]


def _filtered(value: Any, name: str, *args: Any) -> nodes.Filter:
    for arg in args:
        if arg.lineno is None:
            arg.set_lineno(value.lineno)
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _spend(steps: int, characters: int, line: int) -> nodes.ExprStmt:
    value = nodes.Const(None, lineno=line)
    spent = _filtered(value, SPEND, nodes.Const(steps, lineno=line), nodes.Const(characters, lineno=line))
    return nodes.ExprStmt(spent, lineno=line)
