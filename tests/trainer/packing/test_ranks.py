"""An optimizer step dealt to ranks: every trained token once, in its context, trajectories whole, budgets kept."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from properties.episodes import batches, limits
from trainer.packing.test_tree import sample
from verbatim import build_samples
from verbatim.trainer.packing import find_packer, unique_tokens
from verbatim.trainer.packing.cost import CostModel
from verbatim.trainer.packing.ranks import FORWARD_TWICE, deal_samples

COST = CostModel(attention=((0, 0.05), (3, 0.02)), per_target=0.5)


PACKINGS = ("rows", "tree", "auto", "trainer.packing.backwards.pack_backwards")


def equal(one, other):
    """Whether two micro-batches are the same in every array."""
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return np.array_equal(one, other, equal_nan=isinstance(one, np.ndarray) and one.dtype.kind == "f")


def trained(samples):
    """(trajectory, place in it, context, token) of every trained token."""
    before, found = Counter(), Counter()
    for each in samples:
        ids = tuple(each.token_ids.tolist())
        for at in np.flatnonzero(each.loss_mask).tolist():
            found[each.trajectory_id, before[each.trajectory_id] + at, ids[:at], ids[at]] += 1
        before[each.trajectory_id] += len(each)
    return found


def targets(micro_batch):
    """The same, as the micro-batch has it: a token sees those whose interval holds it."""
    found = Counter()
    for at, token, number, offset in zip(
        *(
            getattr(micro_batch.targets, name).tolist()
            for name in ("source_positions", "target_ids", "trajectories", "offsets")
        ),
        strict=True,
    ):
        seen = (micro_batch.starts[: at + 1] <= micro_batch.starts[at]) & (
            micro_batch.starts[at] < micro_batch.ends[: at + 1]
        )
        context = tuple(micro_batch.input_ids[: at + 1][seen].tolist())
        found[micro_batch.trajectory_ids[number], offset, context, token] += 1
    return found


def targets_of(ranks):
    """All ranks' targets together."""
    return sum((targets(micro_batch) for mine in ranks for micro_batch in mine), Counter())


def samples_of(trajectories):
    return [each for trajectory in trajectories for each in build_samples(trajectory, strategy="branching")]


@given(
    batch=batches(),
    limit=limits,
    keep_whole=st.booleans(),
    packing=st.sampled_from(PACKINGS),
    num_ranks=st.integers(1, 9),
)
@drawn("targets of ranks", 30, 2000)
def test_every_trained_token_once_in_its_context_and_trajectories_whole(batch, limit, keep_whole, packing, num_ranks):
    samples = samples_of(batch)
    terms = {"num_ranks": num_ranks, "micro_batch_tokens": limit, "keep_whole": keep_whole, "cost": COST}
    dealt = deal_samples(samples, packing, **terms)
    ranks = [dealt.lay(rank) for rank in range(num_ranks)]
    assert targets_of(ranks) == trained(samples)

    again = deal_samples(samples, packing, **terms)
    assert all(
        equal(one, other) for rank, mine in enumerate(ranks) for one, other in zip(mine, again.lay(rank), strict=True)
    )

    def size_of(name):
        mine = [each for each in samples if each.trajectory_id == name and each.num_trained_tokens]
        return unique_tokens(mine) if packing == "tree" else sum(map(len, mine))

    places = {}
    for rank, mine in enumerate(ranks):
        for k, micro_batch in enumerate(mine):
            for name in micro_batch.trajectory_ids:
                places.setdefault(name, []).append((rank, k))
    if keep_whole:
        assert all(len({rank for rank, _ in found}) == 1 for found in places.values())
        for name, found in places.items():
            assert size_of(name) > limit or len(found) == 1

    longest = Counter()
    for mine in ranks:
        for k, micro_batch in enumerate(mine):
            longest[k] = max(longest[k], int(micro_batch.position_ids.max()) + 1)
    assert all(m.num_tokens <= max(limit, longest[k]) for mine in ranks for k, m in enumerate(mine))

    cut = {place for found in places.values() if len(found) > 1 and keep_whole for place in found}
    # a trajectory in several pieces, which one micro-batch took all the same: the pass that follows it may be longer
    joined = {found[0] for name, found in places.items() if len(found) == 1 and keep_whole and size_of(name) > limit}
    for rank, (mine, costs) in enumerate(zip(ranks, dealt.costs, strict=True)):
        for k, (m, cost) in enumerate(zip(mine, costs, strict=True)):
            factor = cost / COST.micro_batch(m)
            if num_ranks > 1 and (rank, k) in joined - cut:
                assert factor == pytest.approx(1.0) or factor == pytest.approx(FORWARD_TWICE)
            else:
                assert factor == pytest.approx(FORWARD_TWICE if (rank, k) in cut and num_ranks > 1 else 1.0)


@given(batch=batches(), limit=limits, keep_whole=st.booleans(), packing=st.sampled_from(PACKINGS))
@drawn("one rank", 20, 2000)
def test_one_rank_has_the_packers_own_micro_batches(batch, limit, keep_whole, packing):
    samples = samples_of(batch)
    terms = {"micro_batch_tokens": limit, "keep_whole": keep_whole}
    dealt = deal_samples(samples, packing, num_ranks=1, cost=COST, **terms)
    expected = find_packer(packing)(samples, **terms)
    assert len(dealt.lay(0)) == len(expected)
    assert all(equal(one, other) for one, other in zip(dealt.lay(0), expected, strict=True))


def test_a_batch_smaller_than_the_ranks_leaves_some_without_work():
    dealt = deal_samples(
        [sample([1, 2, 3], [2])], "auto", num_ranks=3, micro_batch_tokens=9, keep_whole=False, cost=COST
    )
    assert [len(dealt.lay(rank)) for rank in range(3)] == [1, 0, 0]
    nothing = deal_samples([], "auto", num_ranks=2, micro_batch_tokens=9, keep_whole=False, cost=COST)
    assert (nothing.time, nothing.lay(0), nothing.lay(1)) == (0, [], [])


@pytest.mark.parametrize("prompt", [200, 2])
def test_a_group_is_dealt_with_its_prompt_once_on_each_rank(prompt):
    """Eight answers of 11 tokens to one prompt."""
    ids = list(range(100, 100 + prompt))
    group = [sample([*ids, 1000 + i, *range(10)], [prompt + 5], f"t{i}") for i in range(8)]
    dealt = deal_samples(
        group, "tree", num_ranks=2, micro_batch_tokens=500, keep_whole=False, cost=CostModel(attention=((0, 0.0),))
    )
    assert dealt.costs == ((prompt + 4 * 11,), (prompt + 4 * 11,))


def test_repeated_tokens_are_counted_over_all_ranks():
    samples = [sample([1, 2, 3, 4, 5, 6, 7, i, i], [8], f"{i}") for i in range(20, 24)]
    dealt = deal_samples(
        samples, "tree", num_ranks=2, micro_batch_tokens=50, keep_whole=False, cost=CostModel(attention=((0, 0.0),))
    )
    packed = [m for rank in (0, 1) for m in dealt.lay(rank)]
    assert [m.num_tokens for m in packed] == [11, 11]
    assert [m.num_repeated_tokens for m in packed] == [0, 7]


def test_a_rank_that_trains_what_another_one_trains_is_found():
    """The campaign can fail."""

    def case(batch):
        samples = samples_of(batch)
        dealt = deal_samples(samples, "rows", num_ranks=2, micro_batch_tokens=40, keep_whole=False, cost=COST)
        assert targets_of([dealt.lay(0), dealt.lay(0)]) == trained(samples)

    assert is_found(case, batches())
