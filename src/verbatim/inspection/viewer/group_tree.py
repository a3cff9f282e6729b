"""Builds a prefix tree of the trajectories of a group, in which shared tokens occur only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.token_tree import Int32, TokenPath, common_prefix_length
from verbatim.core.trajectories.outcome import TRAINED
from verbatim.core.types import Trajectory

_SHOWN = 64
"""Number of ids at the start of a node that are decoded to text."""


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A sequence that is not a prefix of a different sequence of the same trajectory."""

    ids: Int32
    trained: NDArray[np.bool_]
    trajectory: int


def group_tree(
    group: Sequence[tuple[Trajectory, Sequence[str]]], text: Callable[[Sequence[int]], str | None]
) -> list[dict[str, Any]]:
    """Return the nodes of the tree. Each node comes after its parent.

    Example: the sequences `[1, 2, 3]` and `[1, 2, 4, 5]` give three nodes: a node with the 2 shared tokens at position
    0, and two nodes at position 2, with 1 token and with 2 tokens.

    Args:
        group: The trajectories, each with the outcomes of its turns.
        text: Decodes the first ids of a node; returns None if there is no tokenizer.
    """
    leaves = [
        leaf for index, (trajectory, outcomes) in enumerate(group) for leaf in _leaves(trajectory, outcomes, index)
    ]
    leaves.sort(key=lambda leaf: leaf.ids.astype(">u4").tobytes())
    shared = [common_prefix_length(a.ids, b.ids) for a, b in pairwise(leaves)]
    nodes: list[dict[str, Any]] = []
    _add_nodes(nodes, leaves, shared, 0, len(leaves), start=0, parent=None)
    for node in nodes:
        first: _Leaf = node.pop("leaf")
        ids = first.ids[node["start"] : node["start"] + min(node["num_tokens"], _SHOWN)]
        node["text"] = text(ids.tolist())
    return nodes


def _leaves(trajectory: Trajectory, outcomes: Sequence[str], index: int) -> list[_Leaf]:
    turns = trajectory.turns
    ends: list[TokenPath] = []
    for place, turn in enumerate(turns):
        later = turns[place + 1 :]
        if not any(other.path.starts_with(turn.path) for other in later) and not any(
            end.starts_with(turn.path) for end in ends
        ):
            ends.append(turn.path)
    leaves = []
    for end in ends:
        ids = end.ids()
        trained = np.zeros(len(ids), dtype=bool)
        for turn, outcome in zip(turns, outcomes, strict=True):
            if outcome == TRAINED and end.starts_with(turn.path):
                trained[turn.num_prompt_tokens : turn.path.length] = True
        leaves.append(_Leaf(ids, trained, index))
    return leaves


def _add_nodes(
    nodes: list[dict[str, Any]],
    leaves: Sequence[_Leaf],
    shared: Sequence[int],
    first: int,
    last: int,
    *,
    start: int,
    parent: int | None,
) -> None:
    """Add the nodes for the leaves from `first` to `last`, in the order of the leaves. These leaves are equal up to
    position `start`."""
    waiting = [(first, last, start, parent)]
    while waiting:
        first, last, start, parent = waiting.pop()
        if first == last:
            continue
        # The leaves are sorted, so neighbours that share more than `start` tokens continue with the same token.
        ends = [place + 1 for place in range(first, last - 1) if shared[place] <= start]
        parts = list(zip([first, *ends], [*ends, last], strict=True))
        if len(parts) > 1:
            waiting += [(a, b, start, parent) for a, b in reversed(parts)]
            continue
        end = min([len(leaves[first].ids), *shared[first : last - 1]])
        inside = leaves[first:last]
        number = parent
        if end > start:
            number = len(nodes)
            trained = np.logical_or.reduce([leaf.trained[start:end] for leaf in inside])
            nodes.append(
                {
                    "id": number,
                    "parent": parent,
                    "start": start,
                    "num_tokens": end - start,
                    "leaf": leaves[first],
                    "trajectories": sorted({leaf.trajectory for leaf in inside}),
                    "trained": int(trained.sum()),
                }
            )
        # Leaves that end with this node add no further nodes. These leaves come first in the sort order.
        rest = first
        while rest < last and len(leaves[rest].ids) == end:
            rest += 1
        waiting.append((rest, last, end, number))
