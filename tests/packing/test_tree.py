"""A prefix tree holds every distinct (prefix, token) once and every trained token as a target once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.trainer_helpers import make_sample
from verbatim.packing import PACKERS, pack_tree, unique_tokens


def sample(ids, trained, name="t"):
    """These ids, with the tokens of these places trained."""
    made = make_sample(len(ids), name, seed=len(ids))
    mask = np.isin(np.arange(len(ids)), trained)
    return replace(
        made, token_ids=np.array(ids, dtype=np.int32), loss_mask=mask,
        logprobs=np.where(mask, -0.5 - np.arange(len(ids)), np.nan).astype(np.float32),
        advantages=mask.astype(np.float32), chunk_ids=np.where(mask, 0, -1).astype(np.int32),
    )  # fmt: skip


def test_the_worked_example():
    (batch,) = pack_tree([sample([1, 2, 4, 5], [2, 3], "b"), sample([1, 2, 3], [2], "a")], micro_batch_tokens=99,
                         keep_whole=False)  # fmt: skip
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert batch.starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.ends.tolist() == [5, 5, 3, 5, 5]
    assert batch.targets.source_positions.tolist() == [1, 1, 3]
    assert batch.targets.target_ids.tolist() == [3, 4, 5]
    assert [batch.trajectory_ids[i] for i in batch.targets.trajectories] == ["a", "b", "b"]
    assert batch.targets.offsets.tolist() == [2, 2, 3]
    assert not batch.is_rows


def test_the_same_sample_twice_is_computed_once_and_trained_twice():
    (batch,) = pack_tree([sample([1, 2, 3], [1, 2], "a"), sample([1, 2, 3], [1, 2], "b")], micro_batch_tokens=99,
                         keep_whole=False)  # fmt: skip
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert sorted(batch.targets.source_positions.tolist()) == [0, 0, 1, 1]


def test_nothing_shared_is_rows():
    (batch,) = pack_tree([sample([1, 2], [1], "a"), sample([3, 4], [1], "b")], micro_batch_tokens=99, keep_whole=False)
    assert batch.is_rows
    assert batch.row_lengths.tolist() == [2, 2]


def test_a_tree_is_cut_where_least_is_shared():
    """Budget 10: three samples fit, with 9 tokens, but the second and the third share only one of them."""
    texts = [[1, 2, 3, 4], [1, 2, 3, 5, 5, 5], [1, 9, 9], [1, 9, 9, 8, 8]]
    batches = pack_tree([sample(t, [len(t) - 1], f"{i}") for i, t in enumerate(texts)], micro_batch_tokens=10,
                        keep_whole=False)  # fmt: skip
    assert [batch.num_tokens for batch in batches] == [7, 5]


def test_samples_of_a_trajectory_stay_together_where_they_fit():
    texts = [("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 5]), ("a", [1, 2, 9, 9]), ("b", [1, 2, 8, 8])]
    batches = pack_tree([sample(ids, [3], name) for name, ids in texts], micro_batch_tokens=8, keep_whole=True)
    assert [batch.trajectory_ids for batch in batches] == [("a",), ("b",)]


def test_nothing_to_train_is_nothing_to_compute():
    assert pack_tree([], micro_batch_tokens=9, keep_whole=False) == []
    assert pack_tree([sample([1, 2], [])], micro_batch_tokens=9, keep_whole=False) == []


def test_auto_takes_the_tree_where_it_saves_tokens_and_the_loss_may_see_pieces():
    shared = [sample([1, 2, 3, 4, 5, 6, i], [6], f"{i}") for i in range(7, 10)]
    alone = [sample([i, 2, 3], [2], f"{i}") for i in range(7, 10)]
    pack = PACKERS["auto"]
    assert unique_tokens(shared) == 9
    assert sum(b.num_tokens for b in pack(shared, micro_batch_tokens=99, keep_whole=False)) == 9
    assert sum(b.num_tokens for b in pack(alone, micro_batch_tokens=99, keep_whole=False)) == 9
    assert sum(b.num_tokens for b in pack(shared, micro_batch_tokens=99, keep_whole=True)) == 21


def path_of(batch, u):
    """Ids from the root to u, read off the intervals alone."""
    ancestors = [k for k in range(u + 1) if batch.starts[k] <= batch.starts[u] < batch.ends[k]]
    return tuple(batch.input_ids[ancestors].tolist())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=14),
    st.integers(3, 40), st.booleans(), st.integers(1, 4),
)  # fmt: skip
def test_every_target_is_predicted_from_exactly_its_context(texts, budget, keep_whole, per_trajectory):
    samples = [sample(text, list(range(1, len(text))), f"t{i // per_trajectory}") for i, text in enumerate(texts)]
    batches = pack_tree(samples, micro_batch_tokens=budget, keep_whole=keep_whole)
    found = []
    for batch in batches:
        paths = [path_of(batch, u) for u in range(batch.num_tokens)]
        assert [len(path) - 1 for path in paths] == batch.position_ids.tolist()
        assert batch.num_tokens <= max(budget, max(map(len, texts))) or keep_whole
        if not keep_whole:
            assert len(set(paths)) == len(paths), "a context is computed twice"
        targets = batch.targets
        found += [
            (paths[source], int(target), batch.trajectory_ids[trajectory], float(logprob))
            for source, target, trajectory, logprob in zip(
                targets.source_positions, targets.target_ids, targets.trajectories, targets.inference_logprobs,
                strict=True,
            )
        ]
    wanted = [
        (tuple(text[:t]), text[t], s.trajectory_id, -0.5 - t)
        for text, s in zip(texts, samples, strict=True) for t in range(1, len(text))
    ]  # fmt: skip
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_offsets_and_lengths_are_those_of_the_trajectory(packing):
    samples = [sample([1, 2, 3], [2], "a"), sample([1, 2], [], "a"), sample([1, 2, 4, 5], [3], "a")]
    (batch,) = PACKERS[packing](samples, micro_batch_tokens=99, keep_whole=True)
    assert sorted(batch.targets.offsets.tolist()) == [2, 8]
    assert batch.trajectory_lengths.tolist() == [9]
