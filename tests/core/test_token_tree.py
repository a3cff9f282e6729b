"""A token tree reads every sequence back, stores each distinct (prefix, token) once, and knows what two share."""

import doctest
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import verbatim.core.token_tree
from drawn import drawn, is_found
from verbatim.core.errors import RecordError
from verbatim.core.token_tree import PathReader, TokenTree, as_ids, common_prefix_length


def ids(*values):
    return np.array(values, dtype=np.int32)


def naive_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def segments_of(paths):
    found = set()
    for path in paths:
        segment = path.segment
        while segment is not None:
            found.add(segment)
            segment = segment.parent
    return found


def test_the_worked_example_in_the_docstring_holds():
    assert doctest.testmod(verbatim.core.token_tree).failed == 0
    tree = TokenTree()
    paths = [tree.add(*map(np.int32, turn))[0] for turn in (([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 9], [6]))]
    assert sorted(s.ids.tolist() for s in segments_of(paths)) == [[1, 2, 3], [4, 5], [9, 6]]
    assert paths[2].segment.parent is paths[0].segment and paths[2].segment.start == 2


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0), ([7], [7], 1)]
)
def test_common_prefix_length(a, b, n):
    assert common_prefix_length(np.array(a), np.array(b)) == n


def test_a_completion_sampled_again_from_the_same_prompt_is_found_where_it_is_stored():
    tree = TokenTree()
    first, _ = tree.add(ids(1, 2), ids(3, 4))
    again, stored = tree.add(ids(1, 2), ids(3, 4))
    longer, _ = tree.add(ids(1, 2), ids(3, 4, 5))
    other, _ = tree.add(ids(1, 2), ids(3, 9))
    assert again.segment is first.segment and stored.tolist() == [3, 4]
    assert longer.starts_with(first) and not other.starts_with(first)
    assert sum(len(s.ids) for s in segments_of([first, again, longer, other])) == 6  # 1 2 3 4, 5, 9


def test_ids_that_are_handed_out_cannot_be_written():
    path, stored = TokenTree().add(ids(1), ids(2))
    for array in (path.ids(), stored):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ([1, 9], [2], "prompt_ids: id 9 at position 1 is outside the vocabulary of 9"),
        ([1], [2, -3], "completion_ids: id -3 at position 1 is outside the vocabulary of 9"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_and_leave_the_tree_alone(prompt, completion, message):
    tree = TokenTree(9)
    tree.add(ids(1), ids(5))
    with pytest.raises(RecordError, match=message):
        tree.add(ids(*prompt), ids(*completion))
    path, _ = tree.add(ids(1, 5, 6), ids(7))
    assert path.ids().tolist() == [1, 5, 6, 7]


@pytest.mark.parametrize("values", [[2**31], np.array([-1]), np.array([2**40], dtype=np.int64), [1.5], ["x"], [[1]]])
def test_what_is_no_list_of_ids_is_refused(values):
    with pytest.raises(RecordError, match="prompt_ids"):
        as_ids(values, "prompt_ids")


def test_an_int32_array_is_taken_without_a_copy():
    array = ids(1, 2, 3)
    assert as_ids(array, "x") is array
    assert as_ids(ids(1, 2, 3, 4)[::2], "x").tolist() == [1, 3]


def test_an_id_too_large_for_32_bits_is_named_as_it_was_given():
    with pytest.raises(RecordError, match="id 4294967295 at position 1"):
        as_ids([7, 2**32 - 1], "prompt_ids")


@st.composite
def sequences(draw):
    """Prompts and completions that extend, branch from, return to or forget earlier ones; prefixes collide."""
    known, turns = [[]], []
    for _ in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(known))
        prompt = base[: draw(st.integers(0, len(base)))] + draw(st.lists(st.integers(0, 2), max_size=4))
        completion = draw(st.lists(st.integers(0, 2), max_size=4))
        turns.append((prompt, completion))
        known.append(prompt + completion)
    return turns


@given(sequences())
@drawn("token trees", 60, 10000)
def test_every_sequence_reads_back_is_stored_once_and_compares_as_lists_do(turns):
    check_tree(turns)


def test_a_comparison_that_is_always_equal_is_found(monkeypatch):
    """The campaign can fail."""
    (path, _) = TokenTree().add(ids(1), ids(2))
    monkeypatch.setattr(type(path), "starts_with", lambda self, other: True)
    assert is_found(check_tree, sequences())


def check_tree(turns):
    tree = TokenTree()
    taken = [tree.add(np.array(p, dtype=np.int32), np.array(c, dtype=np.int32)) for p, c in turns]
    wholes = [p + c for p, c in turns]
    prefixes = {tuple(whole[: n + 1]) for whole in wholes for n in range(len(whole))}
    paths = [path for path, _ in taken]
    assert sum(len(segment.ids) for segment in segments_of(paths)) == len(prefixes)
    for (prompt, completion), (path, stored), whole in zip(turns, taken, wholes, strict=True):
        assert path.ids().tolist() == whole
        assert path.ids(len(prompt)).tolist() == prompt
        assert stored.tolist() == completion
        for other, other_whole in zip(paths, wholes, strict=True):
            assert path.shared_with(other) == naive_prefix(whole, other_whole)
            assert path.starts_with(other) == (whole[: len(other_whole)] == other_whole)


@given(sequences(), st.data())
@drawn("token trees: one reader", 50, 5000)
def test_sequences_read_one_after_the_other_are_those_read_alone(turns, data):
    tree, reader = TokenTree(), PathReader()
    paths = [tree.add(np.array(p, dtype=np.int32), np.array(c, dtype=np.int32))[0] for p, c in turns]
    for place in data.draw(st.permutations(range(len(turns)))):
        prompt, completion = turns[place]
        read = reader.ids(paths[place])
        assert read.tolist() == prompt + completion and read.dtype == np.int32 and not read.flags.writeable


@st.composite
def handed_over(draw, array):
    """The same ids as a caller may have them: its own, read-only and kept, every second of an array, or of a list."""
    kind = draw(st.sampled_from(["own", "kept", "strided", "list"]))
    if kind == "list":
        return as_ids(array.tolist(), "prompt_ids")
    if kind == "strided":
        return np.repeat(array, 2)[::2]
    array = array.copy()
    array.flags.writeable = kind == "own"
    return array


@given(sequences(), st.data())
@drawn("token trees: memory of ids", 50, 5000)
def test_where_the_memory_of_the_ids_lies_changes_nothing_of_what_is_stored(turns, data):
    one, other = TokenTree(), TokenTree()
    for prompt, completion in turns:
        prompt, completion = np.array(prompt, dtype=np.int32), np.array(completion, dtype=np.int32)
        path, _ = one.add(prompt, completion)
        again, stored = other.add(data.draw(handed_over(prompt)), data.draw(handed_over(completion)))
        assert again.ids().tolist() == path.ids().tolist() and stored.tolist() == completion.tolist()
        assert again.length == path.length
        assert [(s.start, s.end) for s in walk(again)] == [(s.start, s.end) for s in walk(path)]


def walk(path):
    segment = path.segment
    while segment is not None:
        yield segment
        segment = segment.parent


def test_a_foreseen_prompt_is_compared_once_and_frees_what_it_was_compared_with():
    tree, known = TokenTree(), ids(1, 2)
    known.flags.writeable = False
    first, _ = tree.add(known, ids(3))
    prompt = ids(1, 2, 3, 4)
    prompt.flags.writeable = False
    last, gone = weakref.ref(known), weakref.ref(prompt)
    tree.foresee(prompt)
    del known
    assert last() is None
    path, stored = tree.add(prompt, ids(5))
    assert path.ids().tolist() == [1, 2, 3, 4, 5] and stored.tolist() == [5]
    assert path.segment.ids.tolist() == [4, 5] and path.starts_with(first)
    tree.add(ids(1, 2, 9), ids(6))
    del prompt
    assert gone() is None


@pytest.mark.parametrize("foreseen", [(1, 2, 3, 4), (1, 2, 9), (1, 2), ()])
@pytest.mark.parametrize("sent", [(1, 2, 3, 4), (1, 2, 3), (1, 2, 9), (7,)])
def test_what_is_foreseen_changes_nothing_of_what_is_recorded(foreseen, sent):
    one, other = TokenTree(), TokenTree()
    for tree in (one, other):
        tree.add(ids(1, 2), ids(3))
    prompt = ids(*foreseen)
    prompt.flags.writeable = False
    one.foresee(prompt)
    paths = [tree.add(ids(*sent), ids(3, 5))[0] for tree in (one, other)]
    assert paths[0].ids().tolist() == paths[1].ids().tolist() == [*sent, 3, 5]
    assert path_segments(paths[0]) == path_segments(paths[1])


def path_segments(path):
    """The ids of each stored segment, from the last one to the root."""
    found, segment = [], path.segment
    while segment is not None:
        found.append(segment.ids.tolist())
        segment = segment.parent
    return found


def test_an_array_that_its_owner_changes_afterwards_changes_nothing():
    tree, prompt, completion = TokenTree(), ids(1, 2), ids(3)
    path, stored = tree.add(prompt, completion)
    prompt[:], completion[:] = 9, 9
    assert path.ids().tolist() == [1, 2, 3] and stored.tolist() == [3]
    longer, _ = tree.add(ids(1, 2, 3, 4), ids(5))
    assert longer.starts_with(path)
