"""A prefix tree holds every distinct (prefix, token) once and every trained token as a target once."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from trainer.trainer_helpers import make_sample
from verbatim.core.types import RoutedExperts
from verbatim.trainer.packing import PACKERS, pack_tree, unique_tokens
from verbatim.trainer.packing.cost import CostModel
from verbatim.trainer.packing.ranks import deal_samples
from verbatim.trainer.packing.tree import _cuts


def sample(ids, trained, name="t"):
    """These ids, with the tokens of these places trained."""
    made = make_sample(len(ids), name, seed=len(ids))
    mask = np.isin(np.arange(len(ids)), trained)
    return replace(
        made,
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5 - np.arange(len(ids)), np.nan).astype(np.float32),
        advantages=mask.astype(np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
    )


def test_the_worked_example():
    (batch,) = pack_tree(
        [sample([1, 2, 4, 5], [2, 3], "b"), sample([1, 2, 3], [2], "a")], micro_batch_tokens=99, keep_whole=False
    )
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
    (batch,) = pack_tree(
        [sample([1, 2, 3], [1, 2], "a"), sample([1, 2, 3], [1, 2], "b")], micro_batch_tokens=99, keep_whole=False
    )
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert sorted(batch.targets.source_positions.tolist()) == [0, 0, 1, 1]


def test_nothing_shared_is_rows():
    (batch,) = pack_tree([sample([1, 2], [1], "a"), sample([3, 4], [1], "b")], micro_batch_tokens=99, keep_whole=False)
    assert batch.is_rows
    assert batch.row_lengths.tolist() == [2, 2]


def test_a_tree_is_cut_where_least_is_shared():
    """Budget 10: three samples fit, with 9 tokens, but the second and the third share only one of them."""
    texts = [[1, 2, 3, 4], [1, 2, 3, 5, 5, 5], [1, 9, 9], [1, 9, 9, 8, 8]]
    batches = pack_tree(
        [sample(t, [len(t) - 1], f"{i}") for i, t in enumerate(texts)], micro_batch_tokens=10, keep_whole=False
    )
    assert [batch.num_tokens for batch in batches] == [7, 5]


def test_samples_of_a_trajectory_stay_together_where_they_fit():
    texts = [("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 5]), ("a", [1, 2, 9, 9]), ("b", [1, 2, 8, 8])]
    batches = pack_tree([sample(ids, [3], name) for name, ids in texts], micro_batch_tokens=8, keep_whole=True)
    assert [batch.trajectory_ids for batch in batches] == [("a",), ("b",)]


def test_nothing_to_train_is_nothing_to_compute():
    assert pack_tree([], micro_batch_tokens=9, keep_whole=False) == []
    assert pack_tree([sample([1, 2], [])], micro_batch_tokens=9, keep_whole=False) == []


def test_auto_takes_the_tree_where_it_saves_tokens():
    shared = [sample([1, 2, 3, 4, 5, 6, i], [6], f"{i}") for i in range(7, 10)]
    alone = [sample([i, 2, 3], [2], f"{i}") for i in range(7, 10)]
    assert unique_tokens(shared) == unique_tokens(alone) == 9
    for keep_whole in (False, True):
        (tree,), (rows,) = (PACKERS["auto"](s, micro_batch_tokens=99, keep_whole=keep_whole) for s in (shared, alone))
        assert (tree.num_tokens, tree.is_rows) == (9, False)
        assert (rows.num_tokens, rows.is_rows) == (9, True)


@pytest.mark.parametrize("keep_whole", [False, True])
def test_auto_counts_what_the_cuts_repeat(keep_whole):
    """Four samples of 21 tokens share the first 20. Only one fits: a tree would repeat all of them."""
    samples = [sample([*range(20), 30 + i], [20], f"{i}") for i in range(4)]
    micro_batches = PACKERS["auto"](samples, micro_batch_tokens=21, keep_whole=keep_whole)
    assert [(batch.num_tokens, batch.num_repeated_tokens) for batch in micro_batches] == [(21, 0)] * 4


def test_a_cut_says_what_it_repeats():
    """Budget 6: `1 2 3 4` and `1 2 3 5` fit together, `1 2 6 6` would be a seventh and an eighth token."""
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 6]]
    batches = pack_tree([sample(t, [3], f"{i}") for i, t in enumerate(texts)], micro_batch_tokens=6, keep_whole=False)
    assert [(batch.num_tokens, batch.num_repeated_tokens) for batch in batches] == [(5, 0), (4, 2)]


def test_small_pieces_of_a_cut_forest_share_a_micro_batch():
    """Budget 9. Two trees of 10 tokens, whose roots have little in common with anything: what is cut off both of them
    fits into one micro-batch."""
    texts = [[r, r, *branch] for r in (1, 2) for branch in ([3], [4, 4, 4, 4, 4, 4, 4])]
    batches = pack_tree([sample(t, [2], f"{i}") for i, t in enumerate(texts)], micro_batch_tokens=9, keep_whole=False)
    assert [batch.num_tokens for batch in batches] == [9, 9, 6]
    assert [batch.num_repeated_tokens for batch in batches] == [0, 0, 4]


def cheapest(lengths, shared, may_cut, budget):
    """Every way to cut: the least (repeated tokens, pieces)."""
    count, costs = len(lengths), []
    for chosen in itertools.product(*([False, True] if may else [False] for may in may_cut[1:])):
        cuts = [0, *(i for i, cut in enumerate(chosen, 1) if cut), count]
        if all(
            sum(lengths[a:b]) - sum(shared[a + 1 : b]) <= budget or not any(may_cut[a + 1 : b])
            for a, b in itertools.pairwise(cuts)
        ):
            costs.append((sum(shared[i] for i in cuts[:-1]), len(cuts) - 1))
    return min(costs)


@given(st.data())
@drawn("cuts of trees", 50, 5000)
def test_no_other_cuts_repeat_less(data):
    """A piece above the budget is one that may not be cut."""
    count = data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    shared = [0, *(data.draw(st.integers(0, min(pair))) for pair in itertools.pairwise(lengths))]
    may_cut = [True, *data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))]
    budget = data.draw(st.integers(1, 30))
    cuts = _cuts(np.array(lengths), np.array(shared), may_cut, budget)
    assert cuts[0] == 0 and cuts[-1] == count and all(may_cut[i] for i in cuts[:-1])
    assert (sum(shared[i] for i in cuts[:-1]), len(cuts) - 1) == cheapest(lengths, shared, may_cut, budget)


def path_of(batch, u):
    """Ids from the root to u, read off the intervals alone."""
    ancestors = [k for k in range(u + 1) if batch.starts[k] <= batch.starts[u] < batch.ends[k]]
    return tuple(batch.input_ids[ancestors].tolist())


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=14),
    st.integers(3, 40),
    st.booleans(),
    st.integers(1, 4),
)
@drawn("targets of trees", 50, 5000)
def test_every_target_is_predicted_from_exactly_its_context(texts, budget, keep_whole, per_trajectory):
    check_contexts(texts, budget, keep_whole, per_trajectory)


def test_a_target_that_moves_to_the_token_before_is_found():
    """The campaign can fail."""

    def moved(*args, **options):
        for batch in pack_tree(*args, **options):
            sources = np.maximum(np.asarray(batch.targets.source_positions) - 1, 0)
            yield replace(batch, targets=replace(batch.targets, source_positions=sources))

    def case(texts):
        check_contexts(texts, 40, False, 1, moved)

    assert is_found(case, st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=14))


def check_contexts(texts, budget, keep_whole, per_trajectory, pack=pack_tree):
    samples = [sample(text, list(range(1, len(text))), f"t{i // per_trajectory}") for i, text in enumerate(texts)]
    batches = pack(samples, micro_batch_tokens=budget, keep_whole=keep_whole)
    found, computed = [], set()
    for batch in batches:
        paths = [path_of(batch, u) for u in range(batch.num_tokens)]
        assert [len(path) - 1 for path in paths] == batch.position_ids.tolist()
        assert batch.num_tokens <= max(budget, max(map(len, texts)))
        assert len(set(paths)) == len(paths), "a context is computed twice in one forward pass"
        assert len(set(paths) & computed) == batch.num_repeated_tokens
        computed |= set(paths)
        targets = batch.targets
        found += [
            (paths[source], int(target), batch.trajectory_ids[trajectory], float(logprob))
            for source, target, trajectory, logprob in zip(
                targets.source_positions,
                targets.target_ids,
                targets.trajectories,
                targets.inference_logprobs,
                strict=True,
            )
        ]
    wanted = [
        (tuple(text[:t]), text[t], s.trajectory_id, -0.5 - t)
        for text, s in zip(texts, samples, strict=True)
        for t in range(1, len(text))
    ]
    assert sorted(found) == sorted(wanted)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=14),
    st.integers(3, 40),
    st.integers(1, 4),
)
@drawn("trajectories of trees", 50, 5000)
def test_a_trajectory_that_fits_is_in_one_micro_batch(texts, budget, per_trajectory):
    samples = [sample(text, [len(text) - 1], f"t{i // per_trajectory}") for i, text in enumerate(texts)]
    batches = pack_tree(samples, micro_batch_tokens=budget, keep_whole=True)
    for name in {s.trajectory_id for s in samples}:
        homes = [batch for batch in batches if name in batch.trajectory_ids]
        assert len(homes) == 1 or unique_tokens([s for s in samples if s.trajectory_id == name]) > budget


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_offsets_and_lengths_are_those_of_the_trajectory(packing):
    samples = [sample([1, 2, 3], [2], "a"), sample([1, 2], [], "a"), sample([1, 2, 4, 5], [3], "a")]
    (batch,) = PACKERS[packing](samples, micro_batch_tokens=99, keep_whole=True)
    assert sorted(batch.targets.offsets.tolist()) == [2, 8]
    assert batch.trajectory_lengths.tolist() == [9]


def routed(sample, experts, known=True):
    """The sample with these experts for each token but the last, one of one layer each."""
    record = np.array([*experts, 0], dtype=np.uint8)[:, None, None]
    known = np.append(np.broadcast_to(known, len(sample) - 1), False)
    return replace(sample, routed_experts=RoutedExperts(experts=np.where(known[:, None, None], record, 0), known=known))


def test_trajectories_of_different_experts_stay_apart_within_the_budget():
    """Sorted by tokens alone, the row of b would stand between those of a, which would then share nothing."""
    prefix = [1, 2, 3, 4, 5, 6]
    samples = [
        routed(sample([*prefix, 10], [6], "a"), [1] * 6),
        routed(sample([*prefix, 11], [6], "b"), [2] * 6),
        routed(sample([*prefix, 12], [6], "a"), [1] * 6),
    ]
    for keep_whole in (True, False):
        (batch,) = pack_tree(samples, micro_batch_tokens=16, keep_whole=keep_whole)
        assert batch.num_tokens == 8 + 7
    assert unique_tokens(samples) == 15


@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 3))
@drawn("trees of experts", 50, 5000)
def test_no_micro_batch_of_recorded_experts_exceeds_the_budget(seed, keep_whole, num_ranks):
    """Unless it is one sample that does."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(int(rng.integers(2, 14))):
        ids = rng.integers(0, 2, int(rng.integers(2, 9)))
        made = sample(ids.tolist(), [len(ids) - 1], f"t{rng.integers(0, 5)}")
        if i % 7:
            known = rng.random(len(ids) - 1) < 0.8
            made = routed(made, rng.integers(0, 2, len(ids) - 1) * (rng.random() < 0.7), known)
        samples.append(made)
    step = deal_samples(
        samples, "tree", num_ranks=num_ranks, micro_batch_tokens=10, keep_whole=keep_whole, cost=CostModel()
    )
    batches = [batch for rank in range(num_ranks) for batch in step.lay(rank)]
    assert sum(len(batch.targets) for batch in batches) == len(samples)
    for batch in batches:
        assert batch.num_tokens <= 10
