"""Has what sequences in flight have in common computed once, after new weights emptied their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.core.token_tree import common_prefix_length
from verbatim.inference.embedded.slots import WAIT_FOR_PREFIX, Slots, SlotTable


class Leader(NamedTuple):
    """Which sequence computes the first tokens of another one."""

    slot: int
    arrival: int
    """Tells the leader's request from a later one in the same slot."""
    shared: int
    """First tokens that both have; at least one less than the other one has."""


def leaders(table: SlotTable, slots: Iterable[int]) -> dict[int, Leader]:
    """The leader of each slot whose sequence begins like that of another one, with `WAIT_FOR_PREFIX` tokens or more.

    In the order of their ids, a sequence has most in common with the one before it. Of all that have as much, the first
    one leads, so that nothing waits for a sequence that waits itself where it need not.

    Example: with 32 equal tokens as a letter, "AB", "ABC" and "AD" are three sequences. The first has no leader, and
    leads the second with 64 tokens and the third with 32.
    """
    order = sorted(slots, key=lambda slot: _known(table, slot).tobytes())
    found: dict[int, Leader] = {}
    branches: list[tuple[int, int]] = []  # tokens in common, and the first of `order` that has them; ever more tokens
    for index in range(1, len(order)):
        slot, first = order[index], index - 1
        common = common_prefix_length(_known(table, order[first]), _known(table, slot))
        while branches and branches[-1][0] >= common:
            first = branches.pop()[1]
        branches.append((common, first))
        shared = min(common, int(table.length[slot]) - 1)  # the last token gives the hidden state to draw from
        if shared >= WAIT_FOR_PREFIX:
            leader = order[first]
            found[slot] = Leader(leader, int(table.arrival[leader]), shared)
    return found


def _known(table: SlotTable, slot: int) -> NDArray[np.int32]:
    return table.ids[slot, : table.length[slot]]


class Rebuild:
    """The sequences in flight whose first tokens another one computes; there are some only after new weights.

    Args:
        table: The state of all slots.
        copy: Lets a slot begin with the first tokens of another: source, slot, number of tokens.
    """

    def __init__(self, table: SlotTable, copy: Callable[[int, int, int], None]) -> None:
        self._table = table
        self._copy = copy
        self._leaders: dict[int, tuple[int, Leader]] = {}
        """By slot, with the arrival of its own request."""

    def begin(self) -> None:
        """Choose who leads those whose caches are empty. Where caches survive new weights, a sequence waits for none
        that began with weights before its own: others would take its keys and values for those of the new ones."""
        table = self._table
        active = np.flatnonzero(table.active)
        self._leaders = {
            slot: (int(table.arrival[slot]), leader)
            for slot, leader in leaders(table, active.tolist()).items()
            if not table.computed[slot] and table.loaded[slot] == table.loaded[leader.slot]
        }

    def go_on(self) -> None:
        """Let sequences begin with what their leaders have computed by now. Where a leader ended before it had computed
        enough, those that waited for it choose again."""
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
        """Those that do not wait for a leader; at least one, where there are any."""
        if not self._leaders:
            return active
        return active[~np.isin(active, list(self._leaders))]
