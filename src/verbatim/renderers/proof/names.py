"""Which names a piece of a chat template takes from outside itself, to read them or to assign their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import nodes


@dataclass(frozen=True)
class Uses:
    """Of names that the piece did not set before."""

    names: frozenset[str] = frozenset()
    """Read, or called."""
    attributes: frozenset[tuple[str, str]] = frozenset()
    """(namespace, attribute) that are assigned; "*" where the namespace goes by a name of the piece's own."""
    read: frozenset[str] = frozenset()
    """Attributes that are read, of whatever."""

    def __or__(self, other: Uses) -> Uses:
        return Uses(self.names | other.names, self.attributes | other.attributes, self.read | other.read)


def uses(body: Sequence[nodes.Node], known: frozenset[str] = frozenset()) -> Uses:
    """Of statements one after the other; `known` names are the piece's own."""
    found = Uses()
    for node in body:
        found |= _uses(node, known)
        if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
            known |= sets(node)
    return found


def sets(node: nodes.Node) -> frozenset[str]:
    """Names that statements after this one may find set by it: what is set in a loop ends with the round."""
    if isinstance(node, nodes.Macro):
        return frozenset({node.name})
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        return stored(node.target)
    if isinstance(node, (nodes.For, nodes.CallBlock)):
        return frozenset()
    return frozenset().union(*map(sets, node.iter_child_nodes()))


def markers(template: nodes.Template) -> frozenset[str]:
    """What a template looks for in texts: `"..." in text`, `text.split("...")` and their like."""
    constants: dict[str, set[str]] = {}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and isinstance(assign.node, nodes.Const):
            constants.setdefault(assign.target.name, set()).add(str(assign.node.value))
    sought: list[nodes.Node] = []
    for compare in template.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            sought.append(compare.expr)
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in ("split", "startswith", "endswith"):
            sought += call.args[:1]
    found: set[str] = set()
    for node in sought:
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            found.add(node.value)
        if isinstance(node, nodes.Name):
            found |= constants.get(node.name, set())
    # Names of fields and single characters are looked for too; ordinary text is full of both.
    return frozenset(marker for marker in found if len(marker) > 2 and not marker.isidentifier())


@lru_cache(maxsize=65_536)
def _uses(node: nodes.Node, known: frozenset[str]) -> Uses:
    if isinstance(node, nodes.Name):
        return Uses(frozenset() if node.ctx == "store" else frozenset({node.name}) - known)
    if isinstance(node, nodes.NSRef):
        if node.name in known:
            return Uses(attributes=frozenset({("*", node.attr)}))
        return Uses(frozenset({node.name}), frozenset({(node.name, node.attr)}))
    if isinstance(node, nodes.If):
        branches = [node.body, node.else_, *(part.body for part in node.elif_)]
        return _all([node.test, *(part.test for part in node.elif_)], known) | _union(uses(b, known) for b in branches)
    if isinstance(node, nodes.For):
        inner = known | stored(node.target) | {"loop"}
        test = _uses(node.test, inner) if node.test is not None else Uses()
        return _uses(node.iter, known) | uses(node.body, inner) | uses(node.else_, known) | test
    if isinstance(node, nodes.Macro):
        return _all(node.defaults, known) | uses(node.body, known | {argument.name for argument in node.args})
    if isinstance(node, nodes.CallBlock):
        return _uses(node.call, known) | uses(node.body, known)
    if isinstance(node, nodes.AssignBlock):
        outside = _uses(node.filter, known) if node.filter is not None else Uses()
        return uses(node.body, known) | _uses(node.target, known) | outside
    inside = _all(node.iter_child_nodes(), known)
    if isinstance(node, nodes.Getattr):
        return inside | Uses(read=frozenset({node.attr}))
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return inside | Uses(read=frozenset({str(node.arg.value)}))
    return inside


def _all(parts: Iterable[nodes.Node], known: frozenset[str]) -> Uses:
    return _union(_uses(part, known) for part in parts)


def _union(found: Iterable[Uses]) -> Uses:
    total = Uses()
    for part in found:
        total |= part
    return total


def stored(target: nodes.Node) -> frozenset[str]:
    """The names that an assignment or a loop sets."""
    return frozenset(n.name for n in (target, *target.find_all(nodes.Name)) if isinstance(n, nodes.Name))
