"""After new weights have emptied the caches: if several sequences in flight share a prefix, one of them computes the
prefix for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verbatim.core.token_tree import common_prefix_length
from verbatim.inference.embedded.slots import WAIT_FOR_PREFIX, Slots, SlotTable


class Leader(NamedTuple):
    """The sequence that computes a prefix for another sequence, the follower."""

    slot: int
    arrival: int
    """Arrival number of the leader's request, which distinguishes it from a later request in the same slot."""
    shared: int
    """Length of the shared prefix, which is less than the follower's length."""


def leaders(table: SlotTable, slots: Iterable[int]) -> dict[int, Leader]:
    """The leader of each slot whose sequence shares at least `WAIT_FOR_PREFIX` first tokens with another sequence.

    If sequences are sorted by their ids, each shares its longest prefix with the sequence before it. If several
    sequences share a prefix of that length, the first of them leads. So a leader that must wait for its own leader is
    chosen only if there is no other choice.

    Example: let each letter be 32 equal tokens; "AB", "ABC" and "AD" are three sequences. The first has no leader. It
        computes 64 tokens for the second and 32 tokens for the third.
    """
    order = sorted(slots, key=lambda slot: _known(table, slot).tobytes())
    found: dict[int, Leader] = {}
    branches: list[tuple[int, int]] = []  # stack of (shared tokens, increasing; first in `order` that shares them)
    for index in range(1, len(order)):
        slot, first = order[index], index - 1
        common = common_prefix_length(_known(table, order[first]), _known(table, slot))
        while branches and branches[-1][0] >= common:
            first = branches.pop()[1]
        branches.append((common, first))
        shared = min(common, int(table.length[slot]) - 1)  # the last token is always computed, for sampling
        if shared >= WAIT_FOR_PREFIX:
            leader = order[first]
            found[slot] = Leader(leader, int(table.arrival[leader]), shared)
    return found


def _known(table: SlotTable, slot: int) -> NDArray[np.int32]:
    return table.ids[slot, : table.length[slot]]


class Rebuild:
    """Tracks the sequences in flight that wait for a leader. Sequences wait only after new weights were loaded.

    Args:
        table: The state of all slots.
        copy: Copies a prefix from one slot to another. Arguments: source, slot, number of tokens.
    """

    def __init__(self, table: SlotTable, copy: Callable[[int, int, int], None]) -> None:
        self._table = table
        self._copy = copy
        self._leaders: dict[int, tuple[int, Leader]] = {}
        """By slot: (the arrival number of the slot's request, the slot's leader)."""

    def begin(self) -> None:
        """Choose leaders for the slots whose caches are empty. If caches survive new weights, leader and follower must
        have begun with the same weights. Otherwise keys and values of older weights would count as keys and values of
        newer weights."""
        table = self._table
        active = np.flatnonzero(table.active)
        self._leaders = {
            slot: (int(table.arrival[slot]), leader)
            for slot, leader in leaders(table, active.tolist()).items()
            if not table.computed[slot] and table.loaded[slot] == table.loaded[leader.slot]
        }

    def go_on(self) -> None:
        """Copy the shared tokens that leaders have computed by now to the sequences that wait for them. If a leader
        ended before it had computed enough, its followers choose a new leader."""
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
        """The slots that do not wait for a leader. There is at least one if any slot is active."""
        if not self._leaders:
            return active
        return active[~np.isin(active, list(self._leaders))]
