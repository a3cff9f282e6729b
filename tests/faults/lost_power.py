"""What a disk may hold after the power was lost in the middle of a recorded trace.

A name (an entry of a folder) is there for good once its folder was synced after it, and a file's content once the file
was. Whatever was not synced may be there or not, in any combination that a file system could have written: changes of
one name keep their order, and a file that is renamed is never lost by that.
"""

from __future__ import annotations

import random
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults.recorder import Node, Op

MODES = ("all", "nothing", "names", "zeros", "random", "journal")
"""What survives of what was not synced: everything (the process was killed, the power stayed on); nothing; the names
and not the contents; the names and the lengths, with zeros as contents; a random part; the names up to some moment, as
a journal has them, and a random part of the contents."""


@dataclass
class Tree:
    """A folder as it stands on the disk."""

    entries: dict[tuple[Node, str], Node] = field(default_factory=dict)
    kinds: dict[Node, tuple[int, str | None]] = field(default_factory=dict)
    contents: dict[Node, bytes] = field(default_factory=dict)

    def files(self, folder: Node = 0, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Path and node of everything that has a name."""
        for (parent, name), node in sorted(self.entries.items(), key=lambda item: item[0][1]):
            if parent == folder:
                yield prefix + name, node
                if stat.S_ISDIR(self.kinds[node][0]):
                    yield from self.files(node, f"{prefix}{name}/")

    def write(self, place: Path) -> None:
        """Make it in an empty folder."""
        for name, node in self.files():
            kind, target = self.kinds[node]
            path = place / name
            if stat.S_ISDIR(kind):
                path.mkdir()
            elif target is not None:
                path.symlink_to(target)
            else:
                path.write_bytes(self.contents[node])

    def fingerprint(self) -> int:
        """Equal for equal trees."""
        return hash(tuple((name, self.kinds[node], self.contents.get(node)) for name, node in self.files()))


def after_loss(ops: Sequence[Op], mode: str, rng: random.Random) -> Tree:
    """The disk after the last of these operations."""
    tree = Tree()
    synced_at: dict[Node, int] = {}
    versions: dict[Node, list[tuple[int, bytes]]] = {}
    for number, op in enumerate(ops):
        if op[0] == "sync":
            synced_at[op[1]] = number
        elif op[0] == "data":
            versions.setdefault(op[1], []).append((number, op[2]))
        elif op[0] == "add":
            tree.kinds[op[3]] = (op[4], op[5])
    names = [(number, op) for number, op in enumerate(ops) if op[0] in ("add", "remove", "move")]
    loose = [number for number, op in names if synced_at.get(op[3] if op[0] == "move" else op[1], -1) < number]
    _apply(tree, [op for number, op in names if number not in _lost(loose, dict(names), mode, rng)])
    for node, (kind, _) in tree.kinds.items():
        if stat.S_ISREG(kind):
            known = versions.get(node, [(0, b"")])
            durable = [data for number, data in known if number < synced_at.get(node, -1)]
            later = [data for _, data in known[len(durable) :]]  # what a sync has replaced never comes back
            content = durable[-1] if durable else b""
            tree.contents[node] = _content(content, later or [content], mode, rng)
    return tree


def _lost(loose: Sequence[int], ops: dict[int, Op], mode: str, rng: random.Random) -> set[int]:
    if mode in ("all", "names", "zeros"):
        return set()
    if mode == "nothing":
        return set(loose)
    if mode == "journal":
        return set(loose[rng.randint(0, len(loose)) :])
    lost, blocked = set[int](), set[tuple[Node, str]]()
    for number in loose:
        op = ops[number]
        keys = {(op[1], op[2])} | ({(op[3], op[4])} if op[0] == "move" else set())
        if keys & blocked or rng.random() < 0.5:
            lost.add(number)
            blocked |= keys
    return lost


def _apply(tree: Tree, ops: Sequence[Op]) -> None:
    for op in ops:
        if op[0] == "add":
            tree.entries[op[1], op[2]] = op[3]
        else:
            node = op[3] if op[0] == "remove" else op[5]
            if tree.entries.get((op[1], op[2])) == node:
                del tree.entries[op[1], op[2]]
            if op[0] == "move":
                tree.entries[op[3], op[4]] = node


def _content(durable: bytes, versions: Sequence[bytes], mode: str, rng: random.Random) -> bytes:
    """`durable` is the last content that was synced; the last of `versions` is what the process had written."""
    latest = versions[-1]
    if mode == "all" or latest == durable:
        return latest
    zeros = durable[: len(latest)] + bytes(max(0, len(latest) - len(durable)))
    common = next(
        (n for n, (a, b) in enumerate(zip(durable, latest, strict=False)) if a != b), min(len(durable), len(latest))
    )  # stays, whatever is lost behind it
    choices: dict[str, Callable[[], bytes]] = {
        "durable": lambda: durable,
        "latest": lambda: latest,
        "an earlier one": lambda: rng.choice([durable, *versions]),
        "cut off": lambda: latest[: rng.randint(common, len(latest))],
        "zeros": lambda: zeros,
    }
    if mode in ("nothing", "names"):
        return durable
    return choices["zeros" if mode == "zeros" else rng.choice(list(choices))]()
