"""Recomputes shared prefixes of sequences in flight only once, after new weights emptied the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.core.token_tree import common_prefix_length
from verbatim.inference.embedded.slots import WAIT_FOR_PREFIX, Slots, SlotTable


class Leader(NamedTuple):
    """The sequence that computes a prefix for another one, its follower."""

    slot: int
    arrival: int
    """Arrival of the leader's request, which tells it from a later request in the same slot."""
    shared: int
    """Length of the shared prefix; less than the follower's length."""


def leaders(table: SlotTable, slots: Iterable[int]) -> dict[int, Leader]:
    """The leader of each slot whose sequence shares a prefix of at least `WAIT_FOR_PREFIX` tokens with another one.

    Sorted by ids, a sequence shares most with the one before it. Among sequences that share equally many tokens, the
    first leads, so that a sequence waits for one that waits itself only if there is no other choice.
    Example: let each letter be 32 equal tokens; "AB", "ABC" and "AD" are three sequences. The first has no leader, and
    leads the second with 64 tokens and the third with 32.
    """
    order = sorted(slots, key=lambda slot: _known(table, slot).tobytes())
    found: dict[int, Leader] = {}
    branches: list[tuple[int, int]] = []  # a stack: shared tokens (increasing), first in `order` to share them
    for index in range(1, len(order)):
        slot, first = order[index], index - 1
        common = common_prefix_length(_known(table, order[first]), _known(table, slot))
        while branches and branches[-1][0] >= common:
            first = branches.pop()[1]
        branches.append((common, first))
        shared = min(common, int(table.length[slot]) - 1)  # the last token is always computed, to sample from
        if shared >= WAIT_FOR_PREFIX:
            leader = order[first]
            found[slot] = Leader(leader, int(table.arrival[leader]), shared)
    return found


def _known(table: SlotTable, slot: int) -> NDArray[np.int32]:
    return table.ids[slot, : table.length[slot]]


class Rebuild:
    """Tracks the sequences in flight that wait for a leader; there are some only after new weights.

    Args:
        table: The state of all slots.
        copy: Copies a prefix from one slot to another. Arguments: source, slot, number of tokens.
    """

    def __init__(self, table: SlotTable, copy: Callable[[int, int, int], None]) -> None:
        self._table = table
        self._copy = copy
        self._leaders: dict[int, tuple[int, Leader]] = {}
        """By slot: the arrival of its own request, and its leader."""

    def begin(self) -> None:
        """Choose leaders for the slots whose caches are empty. If caches survive new weights, both sequences must have
        begun with the same weights; otherwise older keys and values would count as those of newer weights."""
        table = self._table
        active = np.flatnonzero(table.active)
        self._leaders = {
            slot: (int(table.arrival[slot]), leader)
            for slot, leader in leaders(table, active.tolist()).items()
            if not table.computed[slot] and table.loaded[slot] == table.loaded[leader.slot]
        }

    def go_on(self) -> None:
        """Copy to waiting sequences the shared tokens that their leaders have computed by now. If a leader ended before
        it had computed enough, its followers choose again."""
        table, is_lost = self._table, False
        for slot in sorted(self._leaders, key=lambda slot: self._leaders[slot][1].shared):
            arrival, leader = self._leaders[slot]
            if table.arrival[slot] != arrival or not table.active[slot]:
                del self._leaders[slot]
            elif table.arrival[leader.slot] == leader.arrival and table.computed[leader.slot] >= leader.shared:
                self._copy(leader.slot, slot, leader.shared)
                del self._leaders[slot]
            elif table.arrival[leader.slot] != leader.arrival or not table.active[leader.slot]:
                is_lost = True
        if is_lost:
            self.begin()

    def ready(self, active: Slots) -> Slots:
        """The slots that do not wait for a leader: at least one, if any is active."""
        if not self._leaders:
            return active
        return active[~np.isin(active, list(self._leaders))]
