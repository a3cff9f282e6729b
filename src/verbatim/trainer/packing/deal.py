"""Deals pieces of work to ranks, pass by pass, so that ranks wait for each other as little as possible.

A rank computes one micro-batch in each pass, and sharded ranks go through the layers of a pass together: a pass takes
as long as its slowest rank, so a step takes the sum over its passes of the maximum over ranks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ALIKE = 1.005
"""Two deals whose times differ by less are equally fast: the one with fewer passes is taken."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Samples that are computed together."""

    cost: float
    """Above 0."""
    tokens: int
    """What it takes of a micro-batch's tokens, at least 1."""
    block: int | None = None
    """Pieces of one block go to one rank; None: to any."""


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Which rank computes which pieces in which pass."""

    pieces: tuple[tuple[tuple[int, ...], ...], ...]
    """Numbers of pieces, by rank and pass. A rank has none in the passes after its last one."""
    costs: tuple[tuple[float, ...], ...]
    """The sum of their costs, by rank and pass."""

    @property
    def num_passes(self) -> int:
        """The most passes of a rank."""
        return max(map(len, self.pieces))

    @property
    def time(self) -> float:
        """The sum over passes of the largest cost of a rank."""
        return lock_step_time(self.costs)


def lock_step_time(costs: Sequence[Sequence[float]]) -> float:
    """What all ranks take together, in the unit of the costs, which are by rank and pass.

    Example: ranks of `(5, 1)` and `(4, 3)` take `5 + 3 = 8`.
    """
    passes = max(map(len, costs))
    return sum(max(mine[k] for mine in costs if k < len(mine)) for k in range(passes))


def deal(pieces: Sequence[Piece], *, num_ranks: int, most_tokens: int) -> Deal:
    """Each piece to one rank and pass; a function of the pieces and their order alone.

    The most expensive piece first, each goes to the rank with the least cost in the first pass where it fits: tokens
    within the bound, and cost within a level. Of several levels that which takes the least time is kept. The level
    keeps the first passes from becoming long ones that many ranks cannot fill.

    Args:
        pieces: Any number.
        num_ranks: Ranks, at least 1. Some stay without a piece where there are fewer pieces.
        most_tokens: Most tokens of a rank in a pass. A piece above it is alone; in its pass the other ranks may have
            as many tokens as it has, because they would only wait.
    """
    total, largest = sum(p.cost for p in pieces), max((p.cost for p in pieces), default=0.0)
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
    if one.num_passes < other.num_passes:
        return one.time < other.time * ALIKE
    return one.time * (ALIKE if one.num_passes > other.num_passes else 1) < other.time


def _levels(share: float, largest: float) -> Iterator[float]:
    """The costs that a rank may have in a pass: no bound, a rank's share in 1 to 4 passes, and the largest piece."""
    yield float("inf")
    yield from (share / n * 1.01 for n in range(1, 5) if share / n > largest)
    yield from (largest, 1.02 * largest, 1.1 * largest)


@dataclass
class _Pass:
    """One pass being filled."""

    most_tokens: int
    order: list[tuple[float, int]]
    """(cost, rank), the cheapest first."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[list[int]] = field(default_factory=list)
    fewest_tokens: int = 0
    """Tokens of the rank that has the fewest."""

    @classmethod
    def empty(cls, num_ranks: int, most_tokens: int) -> _Pass:
        ranks = range(num_ranks)
        return cls(most_tokens, [(0.0, rank) for rank in ranks], [0] * num_ranks, [[] for _ in ranks])

    def put(self, piece: Piece, number: int, level: float, only: int | None) -> int | None:
        """Take the piece, on this rank alone if one is given. Returns the rank that has it; None: it does not fit."""
        if self.fewest_tokens and self.fewest_tokens + piece.tokens > self.most_tokens:
            return None
        for at, (cost, rank) in enumerate(self.order):
            free = not self.pieces[rank]
            if cost + piece.cost > level and not free:
                return None  # so do those behind it
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
    for block in blocks:
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
    """The numbers of the pieces of each block, and last those of no block; what costs most is first everywhere."""
    blocks: dict[int | None, list[int]] = {}
    for number in sorted(range(len(pieces)), key=lambda i: -pieces[i].cost):  # stable
        blocks.setdefault(pieces[number].block, []).append(number)
    free = blocks.pop(None, [])
    return [*sorted(blocks.values(), key=lambda block: -sum(pieces[i].cost for i in block)), free]
