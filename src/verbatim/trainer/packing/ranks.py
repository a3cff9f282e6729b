"""Packs the samples of an optimizer step for several ranks: decides which rank computes which micro-batch in which
pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing import WORTH_A_TREE, find_packer
from verbatim.trainer.packing.cost import CostModel, Int64
from verbatim.trainer.packing.deal import Piece, deal, lock_step_time
from verbatim.trainer.packing.layout import Row, rows_of
from verbatim.trainer.packing.rows import lay_rows, row_items
from verbatim.trainer.packing.tree import in_order, lay_tree, lengths_of, repeated_tokens, shared_tokens, tree_pieces

Costs = tuple[tuple[float, ...], ...]
"""Costs by rank and pass."""
_Rows = list[list[list[Row]]]
"""Rows by rank and pass."""
FORWARD_TWICE = 4 / 3
"""Factor for the cost of a micro-batch that needs an extra forward pass for its logprobs (`step.py`). A backward pass
costs as much as two forward passes, so the total is four forward passes instead of three."""
_PIECES_OF_A_SHARE = (2, 4, 8)
"""How many pieces to cut a rank's share of a forest into: each of these numbers is tried, and the fastest result is
kept."""
_HALVINGS = 8
"""Number of steps of the binary search for the smallest piece size that gives each rank one piece per pass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DealtStep:
    """An optimizer step, dealt to ranks. In pass k, all ranks compute their k-th micro-batch at the same time."""

    lay: Callable[[int], list[MicroBatch]]
    """Builds the micro-batches of a rank, in the order of the rank's passes; returns [] for a rank without work."""
    costs: Costs
    """Predicted cost of each micro-batch, by rank and pass."""

    @property
    def time(self) -> float:
        """Predicted time of all ranks in lock step, in the unit of the costs."""
        return lock_step_time(self.costs)


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """The settings of a deal: the arguments of `deal_samples`."""

    num_ranks: int
    micro_batch_tokens: int
    keep_whole: bool
    cost: CostModel

    def deal(
        self, items: Sequence[list[Row]], sizes: Sequence[int], cost: Callable[[Sequence[Row]], float]
    ) -> tuple[_Rows, Costs]:
        """The rows and the cost of each pass of each rank.

        Args:
            items: Groups of rows that stay together.
            sizes: Number of tokens of each item.
            cost: The cost of rows that form one micro-batch.
        """
        blocks = _linked([{row.sample.trajectory_id for row in item} for item in items], self.keep_whole)
        pieces = _pieces([cost(item) for item in items], sizes, blocks)
        dealt = deal(pieces, num_ranks=self.num_ranks, most_tokens=self.micro_batch_tokens)
        rows = [[[row for i in numbers for row in items[i]] for numbers in mine] for mine in dealt.pieces]

        def batch_cost(numbers: Sequence[int], batch: Sequence[Row]) -> float:
            # The cost is not the sum over pieces, because pieces in one micro-batch may share a prefix.
            return cost(batch) * (FORWARD_TWICE if any(blocks[i] is not None for i in numbers) else 1.0)

        return rows, tuple(
            tuple(map(batch_cost, numbers, batches)) for numbers, batches in zip(dealt.pieces, rows, strict=True)
        )


def deal_samples(
    samples: Sequence[TrainingSample],
    packing: str,
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    keep_whole: bool,
    cost: CostModel,
) -> DealtStep:
    """Pack and deal an optimizer step: each trained token is in one micro-batch, on one rank. Depends only on the
    samples and their order.

    With one rank, the result is the packer's own micro-batches. With several, samples (for rows) or pieces of the
    forest (for trees) are dealt by predicted cost, and everything a rank gets for one pass becomes one micro-batch. The
    micro-batches of a custom packer are dealt unchanged.

    Args:
        samples: All samples of the optimizer step.
        packing: A packer's name or import path.
        num_ranks: Number of ranks, at least 1. With a small batch, some ranks may get nothing.
        micro_batch_tokens: Maximum tokens in a micro-batch. A longer sample is alone in its micro-batch; in the pass
            that computes this micro-batch, the other ranks may have as many tokens.
        keep_whole: Keep all samples of a trajectory in one micro-batch if they fit, otherwise on one rank.
        cost: Predicts the cost of micro-batches.

    Raises:
        UsageError: two trajectories have the same id.
        ComponentError: the packer cannot be imported.
    """
    terms = _Terms(num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole, cost=cost)
    if num_ranks > 1 and packing in _DEALERS:
        return _DEALERS[packing](samples, terms)
    return _deal_packed(samples, packing, terms)


def _deal_rows(samples: Sequence[TrainingSample], terms: _Terms) -> DealtStep:
    items = row_items(rows_of(samples, keep_whole=terms.keep_whole), terms.micro_batch_tokens, terms.keep_whole)
    sizes = [int(lengths_of(item).sum()) for item in items]
    batches, costs = terms.deal(items, sizes, lambda rows: _cost_of_rows(rows, terms.cost))
    return DealtStep(lay=lambda rank: [lay_rows(batch) for batch in batches[rank]], costs=costs)


def _deal_trees(samples: Sequence[TrainingSample], terms: _Terms) -> DealtStep:
    """Cut the forest into pieces of several sizes and keep the fastest deal: small pieces can be dealt more evenly,
    large pieces repeat fewer tokens."""
    rows = in_order(rows_of(samples, keep_whole=terms.keep_whole))
    forest = _Forest(rows, terms)
    tried = [_cut_forest(forest, limit, terms) for limit in _limits(forest, terms)]
    batches, costs = min(tried, key=lambda found: lock_step_time(found[1]))  # on a tie, prefer larger pieces
    flat = iter(repeated_tokens([batch for mine in batches for batch in mine]))
    repeated = [[next(flat) for _ in mine] for mine in batches]
    return DealtStep(
        lay=lambda rank: [lay_tree(*each) for each in zip(batches[rank], repeated[rank], strict=True)], costs=costs
    )


def _deal_auto(samples: Sequence[TrainingSample], terms: _Terms) -> DealtStep:
    tree, rows = _deal_trees(samples, terms), _deal_rows(samples, terms)
    return tree if tree.time <= WORTH_A_TREE * rows.time else rows


_DEALERS: Mapping[str, Callable[[Sequence[TrainingSample], _Terms], DealtStep]] = {
    "auto": _deal_auto,
    "rows": _deal_rows,
    "tree": _deal_trees,
}


def _deal_packed(samples: Sequence[TrainingSample], packing: str, terms: _Terms) -> DealtStep:
    """Deal finished micro-batches, one per rank and pass."""
    packed = find_packer(packing)(samples, micro_batch_tokens=terms.micro_batch_tokens, keep_whole=terms.keep_whole)
    if terms.num_ranks == 1:
        return DealtStep(lay=lambda rank: packed, costs=(tuple(map(terms.cost.micro_batch, packed)),))
    blocks = _linked([micro_batch.trajectory_ids for micro_batch in packed], terms.keep_whole)
    costs = [terms.cost.micro_batch(micro_batch) for micro_batch in packed]
    dealt = deal(_pieces(costs, [1] * len(packed), blocks), num_ranks=terms.num_ranks, most_tokens=1)
    return DealtStep(lay=lambda rank: [packed[i] for (i,) in dealt.pieces[rank]], costs=dealt.costs)


# ---- rows


def _cost_of_rows(rows: Sequence[Row], cost: CostModel) -> float:
    lengths = lengths_of(rows)
    return float(cost.runs(np.zeros_like(lengths), lengths, _num_targets(rows)).sum())


def _num_targets(rows: Sequence[Row]) -> Int64:
    return np.array([row.sample.num_trained_tokens for row in rows], dtype=np.int64)


# ---- trees


class _Forest:
    """All rows of the step, in the order of `in_order`, with the cost of any subset of them as one micro-batch."""

    def __init__(self, rows: Sequence[Row], terms: _Terms) -> None:
        self.rows, self.shared = rows, shared_tokens(rows)
        self._cost, self._whole_tokens = terms.cost, terms.micro_batch_tokens if terms.keep_whole else 0
        self._lengths, self._num_targets = lengths_of(rows), _num_targets(rows)
        self._place = {row: i for i, row in enumerate(rows)}
        self.num_tokens = int(self._lengths.sum() - self.shared.sum())

    def pieces(self, piece_tokens: int) -> list[tuple[list[Row], int]]:
        """Cut the forest into pieces of at most `piece_tokens` tokens where possible. Returns each piece with its
        number of tokens."""
        return tree_pieces(self.rows, self.shared, piece_tokens=piece_tokens, whole_tokens=self._whole_tokens)

    def cost(self, rows: Sequence[Row]) -> float:
        """The cost of these rows as one micro-batch, without laying them out.

        In sorted order, two rows share a prefix as long as the shortest prefix that neighbouring rows between them
        share.
        """
        places = np.sort(np.array([self._place[row] for row in rows], dtype=np.int64))
        shared = np.zeros_like(places)
        if len(places) > 1:
            shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return float(self._cost.runs(shared, self._lengths[places], self._num_targets[places]).sum())


def _limits(forest: _Forest, terms: _Terms) -> list[int]:
    """The maximum piece sizes to try, in tokens, largest first: a full micro-batch, the smallest size that gives each
    rank at most one piece per pass, and fractions of a rank's share."""
    most = terms.micro_batch_tokens
    num_passes = -(-forest.num_tokens // (terms.num_ranks * most))
    least, even = forest.num_tokens // max(1, terms.num_ranks * num_passes), most
    for _ in range(_HALVINGS):
        tried = (least + even) // 2
        if len(forest.pieces(tried)) <= terms.num_ranks * num_passes:
            even = tried
        else:
            least = tried
    share = forest.num_tokens / terms.num_ranks
    return sorted({most, even, *(min(most, int(share / n) + 1) for n in _PIECES_OF_A_SHARE)}, reverse=True)


def _cut_forest(forest: _Forest, piece_tokens: int, terms: _Terms) -> tuple[_Rows, Costs]:
    """Deal pieces of at most `piece_tokens` tokens. Returns (1) the rows, in the order of `in_order`, and (2) the
    costs, both by rank and pass."""
    pieces = forest.pieces(piece_tokens)
    batches, costs = terms.deal([piece for piece, _ in pieces], [size for _, size in pieces], forest.cost)
    return [[in_order(batch) for batch in mine] for mine in batches], costs


# ---- both


def _pieces(costs: Sequence[float], sizes: Sequence[int], blocks: Sequence[int | None]) -> list[Piece]:
    return [
        Piece(cost=cost if block is None else FORWARD_TWICE * cost, tokens=size, block=block)
        for cost, size, block in zip(costs, sizes, blocks, strict=True)
    ]


def _linked(trajectories: Sequence[Iterable[str]], keep_whole: bool) -> list[int | None]:
    """The block number of each piece: pieces that share trajectories, directly or through other pieces, have the same
    number (union-find); None for a piece that shares no trajectory, and for all pieces if trajectories need not stay
    whole."""
    leader = list(range(len(trajectories)))

    def find(piece: int) -> int:
        while leader[piece] != piece:
            piece = leader[piece]
        return piece

    first: dict[str, int] = {}
    for piece, names in enumerate(trajectories if keep_whole else ()):
        for name in names:
            one, other = sorted((find(first.setdefault(name, piece)), find(piece)))
            leader[other] = one
    heads = [find(piece) for piece in range(len(trajectories))]
    sizes = Counter(heads)
    return [head if sizes[head] > 1 else None for head in heads]
