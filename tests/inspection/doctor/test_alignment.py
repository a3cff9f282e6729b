"""Two sequences part and meet again where least is skipped."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verbatim.core.token_tree import common_prefix_length
from verbatim.inspection.doctor.alignment import Change, align


def change(start, end, now_start, now_end):
    return Change(start=start, end=end, now_start=now_start, now_end=now_end)


def test_a_deletion_is_one_change():
    found = align([1, 2, 7, 8, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 9], 2)
    assert found.changes == (change(2, 4, 2, 2),)
    assert (found.history_end, found.meets_again) == (6, True)


def test_an_insertion_is_one_change():
    found = align([1, 2, 3, 4, 5], [1, 8, 2, 3, 4, 5, 9], 1)
    assert found.changes == (change(1, 1, 1, 2),)
    assert (found.history_end, found.meets_again) == (6, True)


def test_an_insertion_may_be_longer_than_what_follows():
    found = align([1, 2, 3, 4, 5], [1, *range(100, 150), 2, 3, 4, 5, 9], 1)
    assert found.changes == (change(1, 1, 1, 51),)
    assert found.history_end == 55


def test_two_replacements_are_two_changes():
    found = align([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 12, 3, 4, 5, 6, 17, 18, 8, 9, 10], 1)
    assert found.changes == (change(1, 2, 1, 2), change(6, 7, 6, 8))
    assert found.history_end == 10


def test_an_end_that_never_comes_back_leaves_the_last_change_open():
    found = align([1, 2, 3, 4], [1, 7, 8, 9], 1)
    assert found.changes == (change(1, 4, 1, 1),)
    assert (found.history_end, found.meets_again) == (1, False)


def test_a_lost_end_of_turn_does_not_swallow_the_next_message():
    # 9 ends a turn, 5 6 7 begin the next one: its own 9 is not the lost one.
    found = align([1, 2, 9], [1, 2, 5, 6, 7, 8, 8, 9], 2)
    assert found.changes == (change(2, 3, 2, 2),)
    assert not found.meets_again


def test_messages_dropped_in_front_of_alike_ones_are_dropped_not_rewritten():
    earlier = [0, 1, 2, 3, 0, 4, 5, 6, 7, 8]
    found = align(earlier, [0, *earlier[5:], 9], 1)
    assert found.changes == (change(1, 5, 1, 1),)


ids = st.lists(st.integers(0, 3), max_size=40)


@given(ids, ids)
def test_the_changes_turn_the_one_into_the_history_of_the_other(earlier: list[int], prompt: list[int]):
    shared = common_prefix_length(np.array(earlier, dtype=np.int32), np.array(prompt, dtype=np.int32))
    found = align(earlier, prompt, shared)
    built, place = [], 0
    for c in found.changes:
        assert c.start >= place
        built += earlier[place : c.start] + prompt[c.now_start : c.now_end]
        place = c.end
    assert built + earlier[place:] == prompt[: found.history_end]
    assert found.history_end >= shared
    assert found.meets_again or found.changes[-1].end == len(earlier)
