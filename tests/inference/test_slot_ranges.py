import numpy as np

from verbatim.inference.embedded.pass_layout import at_once, shared_prefix, slot_ranges


def cut(slots, lengths):
    return [
        (found.slots.start, found.slots.stop, found.longest, found.in_place)
        for found in slot_ranges(np.array(slots), np.array(lengths), 512)
    ]


def test_long_sequences_are_attended_to_apart_from_short_ones():
    assert cut(range(64), [1000] * 16 + [100] * 48) == [(0, 16, 1000, True), (16, 64, 100, True)]


def test_sequences_of_about_one_length_are_one_run():
    assert cut(range(64), [100 + i for i in range(64)]) == [(0, 64, 163, True)]


def test_few_sequences_among_many_idle_slots_are_copied():
    assert cut([3, 90], [50, 60]) == [(3, 91, 60, False)]


def test_every_sequence_is_in_one_run():
    rng = np.random.default_rng(0)
    for _ in range(50):
        slots = np.flatnonzero(rng.random(130) < rng.random())
        runs = slot_ranges(slots, rng.integers(1, 900, len(slots)), 512)
        assert [i for run in runs for i in range(run.first, run.last)] == list(range(len(slots)))


def test_what_is_shared_is_whole_blocks_of_equal_cached_ids_of_enough_sequences():
    ids = np.zeros((20, 400), dtype=np.int32)
    ids[:, 140:] = np.arange(20)[:, None] + 1
    slots = np.arange(2, 18)
    assert shared_prefix(ids, slots, 150) == 128, "140 are equal"
    assert shared_prefix(ids, slots, 127) == 64, "127 are cached"
    assert shared_prefix(ids, slots[1:], 150) == 0, "15 sequences"
    ids[9, 3] = 7
    assert shared_prefix(ids, slots, 150) == 0
    assert shared_prefix(ids, np.delete(np.arange(2, 19), 7), 150) == 128, "without the one that differs"


def test_prompts_attend_together_as_far_as_their_scores_stay_in_the_cache():
    counts, computed = np.array([100, 7, 100, 100]), np.array([400, 0, 0, 100])
    # Sequences 2, 3 and 0, with 100, 200 and 500 keys: 40,000 pairs of two, 150,000 of three; the limit is 65,536.
    assert [run.tolist() for run in at_once(np.array([0, 2, 3]), counts, computed)] == [[2, 3], [0]]


def test_a_prompt_with_more_pairs_than_the_limit_attends_alone():
    runs = at_once(np.arange(3), np.array([600, 600, 600]), np.zeros(3, dtype=np.int64))
    assert [run.tolist() for run in runs] == [[0], [1], [2]]
