"""Compiles a chat template into a program that charges its own budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes

from verbatim.models.renderers.metering.environment import LOOKED_AT, ROUNDS, SPEND, WRITTEN, metered_environment


@lru_cache(maxsize=64)
def compiled(source: str) -> Template:
    """Compile a template with metering. `chat_template.compile_template` adds the model's name to the errors that are
    raised here.

    A loop charges all its rounds before it starts; the charge for one round is the size of the loop's body. A macro or
    block charges its body when it starts. Operands and keys that may be large are charged by their size. The
    environment charges everything else that can be slow or grow.
    """
    environment = metered_environment()
    tree = environment.parse(source)
    for node in [tree, *tree.find_all(nodes.Node)]:
        _count(node)
    tree.set_environment(environment)
    return environment.from_string(tree)


def _count(node: nodes.Node) -> None:
    """Insert the charge for one node into the tree."""
    match node:
        case nodes.Template() | nodes.Block() | nodes.Macro() | nodes.CallBlock():
            node.body.insert(0, _spend(node, *_weight(node.body)))
        case nodes.For():
            steps, characters = _weight([*node.body, *([] if node.test is None else [node.test])])
            if node.recursive:  # calls of `loop(...)` run rounds too, so the body charges for itself
                node.body.insert(0, _spend(node, steps, characters))
                steps = characters = 1
            node.iter = _filtered(node.iter, ROUNDS, steps, characters)
        case nodes.Concat():
            node.nodes = [_filtered(part, WRITTEN) for part in node.nodes]
        case nodes.Compare(ops=[operand]) if _is_quick(node.expr, operand):
            pass
        case nodes.Compare():
            node.expr = _filtered(node.expr, LOOKED_AT)
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, LOOKED_AT)
        case nodes.Getitem(arg=nodes.Slice()):  # a copy
            node.node = _filtered(node.node, WRITTEN)
        case nodes.Getitem():
            node.arg = _filtered(node.arg, LOOKED_AT)
        case nodes.Pair():
            node.key = _filtered(node.key, LOOKED_AT)


def _is_quick(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """True if a comparison cannot scan much: it has a constant on one side, or a list of constants on the right."""
    right = operand.expr
    if operand.op in ("in", "notin"):
        return isinstance(right, (nodes.List, nodes.Tuple)) and all(isinstance(i, nodes.Const) for i in right.items)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


_APART = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
"""Nodes whose bodies charge for themselves."""


def _weight(parts: Iterable[nodes.Node]) -> tuple[int, int]:
    """(nodes, characters of plain text) in statements and expressions, without bodies that charge for themselves."""
    own = list(_own(parts))
    # Plus 1, because even a round with an empty body takes time.
    return 1 + len(own), sum(len(node.data) for node in own if isinstance(node, nodes.TemplateData))


def _own(parts: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    for node in parts:
        yield node
        yield from _own(node.iter_child_nodes(exclude=("body", "test") if isinstance(node, _APART) else ()))


def _filtered(value: Any, name: str, *args: int) -> Any:
    if isinstance(value, nodes.Const) and not args:
        return value
    constants: list[nodes.Expr] = [nodes.Const(arg, lineno=value.lineno) for arg in args]
    return nodes.Filter(value, name, constants, [], None, None, lineno=value.lineno)


def _spend(node: nodes.Node, steps: int, characters: int) -> nodes.Node:
    spent = _filtered(nodes.Const(None, lineno=node.lineno), SPEND, steps, characters)
    return nodes.ExprStmt(spent, lineno=node.lineno)
