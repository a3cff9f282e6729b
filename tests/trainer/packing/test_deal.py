"""Pieces are dealt once each, within the bounds, so that ranks wait little for each other; costs by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from trainer.packing.test_tree import sample
from verbatim.trainer.packing import pack_rows, pack_tree
from verbatim.trainer.packing.cost import CostModel, model_cost
from verbatim.trainer.packing.deal import Piece, deal, lock_step_time

pieces = st.lists(
    st.builds(
        Piece, cost=st.floats(0.5, 1e4), tokens=st.integers(1, 50), block=st.sampled_from([None, None, None, 1, 2])
    ),
    max_size=30,
)


def of_cost(*costs: float, tokens: int = 1) -> list[Piece]:
    return [Piece(cost=cost, tokens=tokens) for cost in costs]


def test_a_pass_takes_as_long_as_its_slowest_rank():
    assert lock_step_time([(5, 1), (4, 3)]) == 8
    assert lock_step_time([(5, 1), ()]) == 6
    assert lock_step_time([(), ()]) == 0


def test_like_meets_like_where_a_rank_has_room_for_one_piece():
    """In the order they come, passes would take 9 + 8 + 3."""
    dealt = deal(of_cost(9, 1, 8, 3, 2, 3), num_ranks=2, most_tokens=1)
    assert dealt.costs == ((9, 3, 2), (8, 3, 1))
    assert dealt.time == 14


def test_small_pieces_fill_the_pass_of_a_large_one():
    dealt = deal(of_cost(6, 4, 4, 2, 2), num_ranks=3, most_tokens=10)
    assert sorted(dealt.costs) == [(6,), (6,), (6,)]


def test_a_long_first_pass_that_most_ranks_cannot_fill_is_not_made():
    """Four ranks, room for three tokens. The fifth large piece in the first pass makes it 20 long for one rank; what
    is left, too wide to go beside the others, takes 1 more. Two passes of 10 are shorter."""
    dealt = deal([*of_cost(10, 10, 10, 10, 10), *of_cost(1, 1, 1, tokens=3)], num_ranks=4, most_tokens=3)
    assert dealt.time == 20
    assert dealt.costs == ((10, 10), (10, 1), (10, 1), (10, 1))


def test_beside_a_piece_above_the_bound_the_other_ranks_may_have_as_much():
    """The piece of 8 tokens is alone; 4 + 4 beside it take no longer. Elsewhere 4 is the most."""
    dealt = deal(
        [Piece(cost=8, tokens=8), *of_cost(4, 4, tokens=4), *of_cost(1, 1, tokens=3)], num_ranks=2, most_tokens=4
    )
    assert dealt.pieces == (((0,), (3,)), ((1, 2), (4,)))


def test_fewer_pieces_than_ranks_leave_ranks_without_work():
    dealt = deal(of_cost(2, 1), num_ranks=4, most_tokens=1)
    assert dealt.costs == ((2,), (1,), (), ())
    assert deal([], num_ranks=2, most_tokens=1).costs == ((), ())


@given(pieces=pieces, num_ranks=st.integers(1, 6), most_tokens=st.integers(1, 120))
@drawn("pieces of ranks", 50, 5000)
def test_each_piece_once_within_the_bounds_blocks_on_one_rank_and_the_same_again(pieces, num_ranks, most_tokens):
    check_deal(pieces, num_ranks, most_tokens)


def test_a_bound_that_is_not_kept_is_found():
    """The campaign can fail."""

    def generous(pieces, *, num_ranks, most_tokens):
        return deal(pieces, num_ranks=num_ranks, most_tokens=2 * most_tokens)

    assert is_found(lambda pieces: check_deal(pieces, 2, 40, generous), pieces)


def check_deal(pieces, num_ranks, most_tokens, deal=deal):
    dealt = deal(pieces, num_ranks=num_ranks, most_tokens=most_tokens)
    assert deal(pieces, num_ranks=num_ranks, most_tokens=most_tokens) == dealt
    placed = [i for mine in dealt.pieces for together in mine for i in together]
    assert sorted(placed) == list(range(len(pieces)))
    rank_of = {i: rank for rank, mine in enumerate(dealt.pieces) for together in mine for i in together}
    for block in (1, 2):
        assert len({rank_of[i] for i, piece in enumerate(pieces) if piece.block == block}) <= 1
    for k in range(dealt.num_passes):
        together = [mine[k] for mine in dealt.pieces if k < len(mine)]
        bound = max(most_tokens, *(pieces[i].tokens for numbers in together for i in numbers))
        assert all(sum(pieces[i].tokens for i in numbers) <= bound for numbers in together)
        assert all(numbers for numbers in together)
        assert all(
            len(numbers) == 1 or pieces[i].tokens <= most_tokens or bound >= sum(pieces[j].tokens for j in numbers)
            for numbers in together
            for i in numbers
        )
    for mine, costs in zip(dealt.pieces, dealt.costs, strict=True):
        assert costs == pytest.approx([sum(pieces[i].cost for i in numbers) for numbers in mine])


@given(costs=st.lists(st.floats(0.5, 1e4), min_size=1, max_size=60), num_ranks=st.integers(1, 8))
@drawn("balance of ranks", 50, 5000)
def test_with_room_for_everything_no_rank_has_more_than_a_share_and_one_piece(costs, num_ranks):
    """Largest first to the least loaded: 4/3 of the best at most, and a share plus one piece in any case."""
    time = deal(of_cost(*costs), num_ranks=num_ranks, most_tokens=1000).time
    assert max(sum(costs) / num_ranks, *costs) * (1 - 1e-9) <= time
    assert time <= (sum(costs) / num_ranks + max(costs)) * 1.01


# ---- costs


def test_the_worked_example_of_a_cost():
    cost = CostModel(attention=((0, 0.5), (2, 0.25)), per_target=3.0)
    (rows,) = pack_rows([sample([1, 2, 3], [2])], micro_batch_tokens=9, keep_whole=False)
    assert cost.micro_batch(rows) == 10.25
    assert cost.runs(np.array([0]), np.array([3]), np.array([1])).tolist() == [10.25]
    assert cost.runs(np.array([1]), np.array([3]), np.array([0])).tolist() == [2 + 0.5 * 5 + 0.25 * 4]


def test_a_shared_prefix_costs_once():
    """[1, 2, 3] and [1, 2, 4, 5]: five tokens, which see 1, 2, 3, 3 and 4."""
    (tree,) = pack_tree(
        [sample([1, 2, 3], [2], "a"), sample([1, 2, 4, 5], [3], "b")], micro_batch_tokens=9, keep_whole=False
    )
    assert CostModel(attention=((0, 0.1),), per_target=0.5).micro_batch(tree) == pytest.approx(5 + 1.3 + 2 * 0.5)


def test_the_costs_of_a_model_follow_from_its_shape():
    """Width 8, two heads of 6, one key and value head, inner 16: 8 (2 * 12 + 2 * 6 + 3 * 16) = 672 parameters a
    layer. A pair takes 4 * 12 operations and a token 2 * 672; a target 2 * 8 * 100, a token of two layers 4 * 672."""
    shape = SimpleNamespace(
        hidden_size=8,
        num_attention_heads=2,
        head_dim=6,
        num_key_value_heads=1,
        intermediate_size=16,
        num_hidden_layers=2,
        vocab_size=100,
    )
    cost = model_cost(shape)
    assert cost.attention == ((0, pytest.approx(48 / 1344)),)
    assert cost.per_target == pytest.approx(1600 / 2688)
    shape.layer_types, shape.sliding_window = ["sliding_attention", "full_attention"], 4
    assert model_cost(shape).attention == ((0, pytest.approx(24 / 1344)), (4, pytest.approx(24 / 1344)))
    shape.num_experts_per_tok, shape.moe_intermediate_size = 2, 4  # experts of 8 in all: half the inner width
    assert model_cost(shape).per_target == pytest.approx(1600 / (4 * (672 - 8 * 3 * 8)))
