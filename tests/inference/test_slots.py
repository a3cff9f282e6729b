import numpy as np
import pytest

from verbatim.core.types import KeptSets
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.slots import WAIT_FOR_PREFIX, SlotTable


def ids(*values):
    return np.array(values, dtype=np.int32)


def request(prompt, session="", **params):
    return SampleRequest(prompt_ids=prompt, params=SamplingParams(**params), seed=0, session=session)


def run(table, slot, prompt, session, version=0):
    """A sequence that started, was computed whole, and ended."""
    table.start(slot, request(prompt, session), 0, version)
    table.computed[slot] = len(prompt)
    table.release(slot)


def test_a_session_returns_to_its_own_slot():
    table = SlotTable(3, 0, 32)
    run(table, 1, ids(1, 2, 3), "a")
    place = table.place(ids(1, 2, 3, 4), "a", 0, keep=False)
    assert (place.slot, place.source, place.reused) == (1, 1, 3)


def test_the_last_prompt_token_is_always_computed():
    table = SlotTable(2, 0, 32)
    run(table, 0, ids(1, 2, 3), "a")
    assert table.place(ids(1, 2, 3), "a", 0, keep=False).reused == 2


def test_another_session_copies_the_shared_prefix_and_takes_the_least_recently_used_slot():
    table = SlotTable(3, 0, 32)
    run(table, 2, ids(1, 2, 9), "b")
    run(table, 0, ids(1, 2, 3), "a")
    place = table.place(ids(1, 2, 7, 7), "c", 0, keep=False)
    assert (place.slot, place.source, place.reused) == (1, 0, 2)  # slot 1 was never used
    run(table, 1, ids(5, 5), "d")
    place = table.place(ids(1, 2, 7, 7), "c", 0, keep=False)
    assert (place.slot, place.source, place.reused) == (2, 2, 2)  # slot 2 ended first, and has the prefix itself


def test_a_request_waits_when_every_slot_is_taken():
    table = SlotTable(1, 2, 32)
    table.start(0, request(ids(1, 2)), 0, 0)
    assert table.place(ids(3), "", 0, keep=False) is None


def test_stale_ids_beyond_what_is_computed_are_no_prefix():
    table = SlotTable(1, 0, 32)
    run(table, 0, ids(1, 2, 3, 4, 5), "a")
    table.computed[0] = 2
    assert table.place(ids(1, 2, 3, 4, 5, 6), "a", 0, keep=False).reused == 2


def test_a_request_waits_for_a_long_prefix_that_another_is_about_to_compute():
    table = SlotTable(2, 0, 128)
    long = np.arange(WAIT_FOR_PREFIX + 8, dtype=np.int32)
    table.start(0, request(long), 0, 0)
    assert table.place(long, "", 0, keep=False) is None
    assert table.place(np.concatenate([long[:8], ids(99, 98)]), "", 0, keep=False) is not None
    table.computed[0] = len(long)
    assert table.place(long, "", 0, keep=False).reused == len(long) - 1


@pytest.mark.parametrize(("keep", "session", "reused"), [(False, "a", 0), (True, "a", 3), (True, "b", 0)])
def test_prefixes_of_earlier_weights_are_reused_only_by_their_own_session_and_only_under_keep(keep, session, reused):
    table = SlotTable(2, 0, 32)
    run(table, 0, ids(1, 2, 3), "a", version=4)
    assert table.place(ids(1, 2, 3, 4), session, 5, keep=keep).reused == reused


def test_new_weights_leave_exact_ids_to_be_processed_again():
    table = SlotTable(2, 0, 32)
    run(table, 1, ids(7, 7, 7), "old")
    table.start(0, request(ids(1, 2, 3)), 0, 0)
    table.computed[0] = 3
    table.append(np.array([0]), (np.array([5]), np.array([-1.0], np.float32), None), 0)
    table.rebuild_all(1)
    assert table.length[0] - table.computed[0] == 4
    assert table.ids[0, :4].tolist() == [1, 2, 3, 5]
    assert table.place(ids(7, 7, 7, 1), "old", 1, keep=False).reused == 0


def test_each_sequence_has_its_own_stop_ids_and_limit():
    table = SlotTable(3, 0, 8)
    table.start(0, request(ids(1), stop_token_ids=(5,)), 0, 0)
    table.start(1, request(ids(1), stop_token_ids=(6, 7, 8)), 0, 0)
    table.start(2, request(ids(1, 1, 1, 1, 1, 1, 1), max_tokens=50), 0, 0)  # the context has room for one more
    ended = table.append(np.arange(3), (np.array([8, 8, 8]), np.zeros(3, np.float32), None), 0)
    assert ended.tolist() == [1, 2]
    assert table.stopped(np.arange(3)).tolist() == [False, True, False]


def test_a_parked_prefix_is_found_and_its_old_slot_forgets_it():
    table = SlotTable(1, 2, 32)
    run(table, 0, ids(1, 2, 3), "a")
    place = table.parking_place()
    table.move(0, place)
    assert table.computed[0] == 0
    found = table.place(ids(1, 2, 3, 4), "a", 0, keep=False)
    assert (found.slot, found.source, found.reused) == (0, place, 3)


def test_a_session_goes_on_from_a_siblings_longer_prefix_in_its_own_slot():
    table = SlotTable(3, 0, 32)
    run(table, 0, ids(1, 2, 3), "a")
    run(table, 1, ids(1, 2, 3, 4, 5), "b")
    place = table.place(ids(1, 2, 3, 4, 5, 6), "a", 0, keep=False)
    assert (place.slot, place.source, place.reused) == (0, 1, 5)


def test_the_longest_prefix_is_found_whatever_else_is_cached():
    rng = np.random.default_rng(0)
    for _ in range(100):
        table = SlotTable(6, 6, 40)
        for slot in range(6):
            run(table, slot, rng.integers(0, 2, rng.integers(1, 30)).astype(np.int32), str(slot))
        prompt = rng.integers(0, 2, 12).astype(np.int32)
        known = [table.ids[slot, : table.computed[slot]] for slot in range(6)]
        best = max(next((i for i in range(min(len(k), 11)) if k[i] != prompt[i]), min(len(k), 11)) for k in known)
        assert table.place(prompt, "new", 0, keep=False).reused == best


def test_old_records_are_for_the_session_alone():
    table = SlotTable(2, 0, 32)
    run(table, 0, ids(1, 2, 3), "a")
    table.old_records[0] = 3
    table.last_used[1] = 99  # slot 0 is the first that is taken
    assert table.place(ids(1, 2, 3, 4), "a", 0, keep=False).reused == 3
    assert table.place(ids(1, 2, 3, 4), "b", 0, keep=False).reused == 0
    run(table, 1, ids(1, 2, 9), "c")
    table.last_used[1] = 99
    place = table.place(ids(1, 2, 7), "d", 0, keep=False)
    assert (place.slot, place.source, place.reused) == (0, 1, 2)
    table.forget(0)
    assert table.old_records[0] == 0


def test_a_pass_that_is_repeated_leaves_one_kept_set_for_each_token():
    table = SlotTable(1, 0, 8)
    table.start(0, request(ids(1), top_k=2, return_kept_sets=True), 0, 0)
    before = table.snapshot()
    for kept in ([3, 4], [4, 5]):
        table.restore(before)
        table.append(np.array([0]), (np.array([4]), np.zeros(1, np.float32), KeptSets.of([kept])), 0)
    table.append(np.array([0]), (np.array([6]), np.zeros(1, np.float32), KeptSets.of([[6]])), 0)
    found = table.kept_sets(0)
    assert [found[place].tolist() for place in range(len(found))] == [[4, 5], [6]]
