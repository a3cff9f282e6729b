"""Deals pieces of work to ranks, pass by pass, so that ranks wait for each other as little as possible.

A rank computes one micro-batch per pass. Sharded ranks go through the layers of a pass together, so a pass takes as
long as its slowest rank, and a step takes the sum over passes of the maximum over ranks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ALIKE = 1.005
"""If the times of two deals differ by less than this factor, the times count as equal, and the deal with fewer passes
wins."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Samples that are computed together."""

    cost: float
    """Predicted cost, above 0."""
    tokens: int
    """Tokens in a micro-batch, at least 1."""
    block: int | None = None
    """Pieces with the same block number go to the same rank; None if the piece may go to any rank."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """An assignment of pieces to ranks and passes."""

    pieces: tuple[tuple[tuple[int, ...], ...], ...]
    """Indices of pieces, by rank and pass. Ranks may have different numbers of passes."""
    costs: tuple[tuple[float, ...], ...]
    """Sum of the costs of each entry of `pieces`, by rank and pass."""

    @property
    def num_passes(self) -> int:
        """Number of passes of the rank that has the most passes."""
        return max(map(len, self.pieces))

    @property
    def time(self) -> float:
        """The predicted time of all ranks: the sum over passes of the maximum cost over ranks."""
        return lock_step_time(self.costs)


def lock_step_time(costs: Sequence[Sequence[float]]) -> float:
    """The time of all ranks in lock step, in the unit of `costs`. The costs are by rank and pass.

    Example: two ranks with costs `(5, 1)` and `(4, 3)` take `5 + 3 = 8`.
    """
    passes = max(map(len, costs))
    return sum(max(mine[k] for mine in costs if k < len(mine)) for k in range(passes))


def deal(pieces: Sequence[Piece], *, num_ranks: int, most_tokens: int) -> Deal:
    """Assign each piece to one rank and pass; depends only on the pieces and their order.

    Pieces are placed in order of decreasing cost. Each piece goes to the cheapest rank in the first pass where it fits,
    that is, where the rank's tokens stay within `most_tokens` and the rank's cost stays within a limit, the level. The
    level keeps the first passes from growing so long that not all ranks can fill them. Several levels are tried, and
    the fastest deal wins.

    Args:
        pieces: The pieces, any number.
        num_ranks: Number of ranks, at least 1. With fewer pieces than ranks, some ranks get no piece.
        most_tokens: Maximum tokens of a rank in a pass. A larger piece is the only piece of its rank in a pass. In this
            pass the other ranks may have as many tokens too, because they would only wait for the large piece.
    """
    total, largest = sum(p.cost for p in pieces), max((p.cost for p in pieces), default=0.0)
    # No deal can take less time than `bound`, so a deal within `ALIKE` of it ends the search.
    bound = max(total / num_ranks, largest)
    best: Deal | None = None
    for level in _levels(total / num_ranks, largest):
        found = _deal(pieces, num_ranks, most_tokens, level)
        if best is None or _is_better(found, best):
            best = found
        if best.time <= bound * ALIKE:
            break
    assert best is not None
    return best


def _is_better(one: Deal, other: Deal) -> bool:
    """True if `one` is better than `other`: with fewer passes it may be slower by up to `ALIKE`; with more passes it
    must be faster by `ALIKE`."""
    if one.num_passes < other.num_passes:
        return one.time < other.time * ALIKE
    return one.time * (ALIKE if one.num_passes > other.num_passes else 1) < other.time


def _levels(share: float, largest: float) -> Iterator[float]:
    """The cost limits to try, per rank and pass: no limit, an even share over 1 to 4 passes, and about the cost of the
    largest piece."""
    yield float("inf")
    yield from (share / n * 1.01 for n in range(1, 5) if share / n > largest)
    yield from (largest, 1.02 * largest, 1.1 * largest)


@dataclass
class _Pass:
    """One pass being filled."""

    most_tokens: int
    """Maximum tokens of a rank; a piece larger than this maximum raises the maximum."""
    order: list[tuple[float, int]]
    """(cost, rank), cheapest first."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens, by rank."""
    pieces: list[list[int]] = field(default_factory=list)
    """Indices of pieces by rank."""
    fewest_tokens: int = 0
    """Number of tokens of the rank that has the fewest, for a quick test of whether a piece fits on any rank."""

    @classmethod
    def empty(cls, num_ranks: int, most_tokens: int) -> _Pass:
        ranks = range(num_ranks)
        return cls(most_tokens, [(0.0, rank) for rank in ranks], [0] * num_ranks, [[] for _ in ranks])

    def put(self, piece: Piece, number: int, level: float, only: int | None) -> int | None:
        """Place a piece on a rank, or on the rank `only` if that is given. Returns the rank, or None if the piece does
        not fit. A rank that is still empty accepts any piece."""
        if self.fewest_tokens and self.fewest_tokens + piece.tokens > self.most_tokens:
            return None
        for at, (cost, rank) in enumerate(self.order):
            free = not self.pieces[rank]
            if cost + piece.cost > level and not free:
                return None  # the following ranks have at least this cost
            if only not in (None, rank) or not (free or self.tokens[rank] + piece.tokens <= self.most_tokens):
                continue
            del self.order[at]
            insort(self.order, (cost + piece.cost, rank))
            self.tokens[rank] += piece.tokens
            self.most_tokens = max(self.most_tokens, self.tokens[rank])
            self.fewest_tokens = min(self.tokens)
            self.pieces[rank].append(number)
            return rank
        return None


def _deal(pieces: Sequence[Piece], num_ranks: int, most_tokens: int, level: float) -> Deal:
    """The deal for one `level`, the cost limit of a rank in a pass."""
    passes: list[_Pass] = []
    load = [0.0] * num_ranks

    def put(number: int, only: int | None = None) -> None:
        piece = pieces[number]
        for one in passes:
            rank = one.put(piece, number, level, only)
            if rank is not None:
                break
        else:
            passes.append(_Pass.empty(num_ranks, most_tokens))
            rank = passes[-1].put(piece, number, level, only)
            assert rank is not None
        load[rank] += piece.cost

    *blocks, free = _blocks(pieces)
    for block in blocks:  # before the pieces without a block, which can fill the gaps that whole blocks leave
        rank = load.index(min(load))
        for number in block:
            put(number, rank)
    for number in free:
        put(number)
    return Deal(
        pieces=tuple(tuple(tuple(p.pieces[r]) for p in passes if p.pieces[r]) for r in range(num_ranks)),
        costs=tuple(
            tuple(sum(pieces[i].cost for i in p.pieces[r]) for p in passes if p.pieces[r]) for r in range(num_ranks)
        ),
    )


def _blocks(pieces: Sequence[Piece]) -> list[list[int]]:
    """One list per block with the indices of its pieces, and a last list with the indices of the pieces without a
    block; each list is sorted by decreasing cost."""
    blocks: dict[int | None, list[int]] = {}
    for number in sorted(range(len(pieces)), key=lambda i: -pieces[i].cost):  # stable
        blocks.setdefault(pieces[number].block, []).append(number)
    free = blocks.pop(None, [])
    return [*sorted(blocks.values(), key=lambda block: -sum(pieces[i].cost for i in block)), free]
