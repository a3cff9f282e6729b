"""Packs training samples as prefix trees: a prefix that several samples share is computed once."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from verbatim.core.records.experts import RoutedExperts, same_routing
from verbatim.core.token_tree import common_prefix_length
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing.layout import (
    Row,
    by_trajectory,
    experts_of,
    first_fit_decreasing,
    rows_of,
    targets_of,
    token_order,
)

Int64 = NDArray[np.int64]


def pack_tree(samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool) -> list[MicroBatch]:
    """Pack samples as prefix trees: each (prefix, token) is computed once, and every trained token is a target exactly
    once.

    The samples, sorted by their tokens, are the leaves of a forest in depth-first order: each sample shares a path from
    the root with the sample before it, and adds the rest of its tokens. Samples of different trajectories and groups
    share too, because equal tokens are an equal context. A forest above the budget is cut between samples, where the
    fewest shared tokens have to be repeated. Small pieces are combined into one micro-batch.

    Example: the samples `[1, 2, 3]` and `[1, 2, 4, 5]` give `input_ids = [1, 2, 3, 4, 5]`,
    `position_ids = [0, 1, 2, 2, 3]`, `starts = [0, 1, 2, 3, 4]`, `ends = [5, 5, 3, 5, 5]`; the token at index 1 (the id
    2, which both samples share) is the source of the targets 3 and 4. If only four tokens fit, the samples become two
    micro-batches, and the second repeats 2 tokens.

    Args:
        samples: Same as for `pack_rows`.
        micro_batch_tokens: Maximum distinct tokens in a micro-batch; a longer sample is alone in its micro-batch.
        keep_whole: Keep all samples of a trajectory in one micro-batch if they fit.

    Raises:
        UsageError: two trajectories have the same id.
    """
    rows = in_order(rows_of(samples, keep_whole=keep_whole))
    whole_tokens = micro_batch_tokens if keep_whole else 0
    pieces = tree_pieces(rows, shared_tokens(rows), piece_tokens=micro_batch_tokens, whole_tokens=whole_tokens)
    items, sizes = [piece for piece, _ in pieces], [size for _, size in pieces]
    batches = first_fit_decreasing(items, sizes, micro_batch_tokens)
    batches = [in_order(batch) for batch in batches]
    return [lay_tree(*each) for each in zip(batches, repeated_tokens(batches), strict=True)]


def tree_pieces(
    rows: Sequence[Row], shared: Int64, *, piece_tokens: int, whole_tokens: int = 0
) -> list[tuple[list[Row], int]]:
    """Cut a forest between samples so that the pieces repeat the fewest tokens. Returns the rows and the number of
    distinct tokens of each piece.

    Args:
        rows: Rows in the order of `in_order`.
        shared: Their `shared_tokens`.
        piece_tokens: Maximum distinct tokens in a piece, where a cut is possible.
        whole_tokens: Trajectories of at most this many distinct tokens are not cut.
    """
    if whole_tokens:
        # A trajectory's rows must be neighbours to stay in one piece, although they share fewer tokens in this order.
        rows = [row for together in by_trajectory(rows) for row in together]
        shared = shared_tokens(rows)
    lengths = lengths_of(rows)
    may_cut = _between_trajectories(rows, lengths, shared, whole_tokens) if whole_tokens else [True] * len(rows)
    return [
        (list(rows[start:end]), int(lengths[start:end].sum() - shared[start + 1 : end].sum()))
        for start, end in pairwise(_cuts(lengths, shared, may_cut, piece_tokens))
    ]


def unique_tokens(samples: Sequence[TrainingSample]) -> int:
    """Number of distinct tokens in the uncut forest of all samples with a trained token: the fewest tokens that
    `pack_tree` can compute."""
    rows = in_order(rows_of(samples))
    return int(lengths_of(rows).sum() - shared_tokens(rows).sum())


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows sorted by their tokens and recorded experts. Rows with long common prefixes become neighbours, so no other
    order lets rows share more tokens with the row before them. This also holds for every subset of the rows."""
    rows = list(rows)
    return [rows[i] for _, i in sorted((key, i) for i, key in enumerate(_keys(rows)))]


def _keys(rows: Sequence[Row]) -> list[bytes]:
    """One sort key per row. A key has `_words(rows)` 4-byte words for each token."""
    if _words(rows) == 1:
        return [token_order(row.sample) for row in rows]
    keys = []
    for row in rows:
        key = np.zeros((len(row.sample), 3), dtype=">u4")
        key[:, 0] = row.sample.token_ids
        if row.sample.routed_experts is not None:
            digests = _digests(row.sample.routed_experts)[:-1]  # nothing is recorded for the last token
            key[:-1, 1], key[:-1, 2] = digests >> np.uint64(32), digests & np.uint64(0xFFFFFFFF)
        keys.append(key.tobytes())
    return keys


def _words(rows: Sequence[Row]) -> int:
    """Words per token in a sort key: 1 for the id, and 2 for a digest of the experts if any are recorded."""
    return 1 if all(row.sample.routed_experts is None for row in rows) else 3


def _digests(routed: RoutedExperts) -> NDArray[np.uint64]:
    """A digest of each token's experts, 0 where they are not recorded: uint64 [N].

    A collision is harmless: it only puts a row in a worse place, because `shared_tokens` compares the experts exactly.
    """
    flat = routed.experts.reshape(len(routed), -1)
    weights = np.random.default_rng(0).integers(1, 2**63, flat.shape[1], dtype=np.uint64) | np.uint64(1)
    found = np.einsum("nk,k->n", flat, weights, dtype=np.uint64, casting="unsafe") | np.uint64(1)
    return np.where(routed.known, found, np.uint64(0))


def lengths_of(rows: Sequence[Row]) -> Int64:
    """Number of tokens in each row: int64."""
    return np.array([len(row.sample) for row in rows], dtype=np.int64)


def _common_tokens(key: bytes, other: bytes, words: int) -> int:
    """Length in tokens of the common prefix of two sort keys."""
    one, two = (np.frombuffer(each, dtype=">i4") for each in (key, other))
    return common_prefix_length(one, two) // words


def shared_tokens(rows: Sequence[Row]) -> Int64:
    """Number of tokens that each row shares with the row before it; 0 for the first: int64.

    Tokens with recorded experts are shared only if the experts are equal. No experts are recorded for a sample's last
    token, from which nothing is predicted, so the last token can always be shared.
    """
    samples = [row.sample for row in rows]
    return np.array([0, *map(_shared, samples, samples[1:])][: len(rows)], dtype=np.int64)


def _shared(one: TrainingSample, other: TrainingSample) -> int:
    count = common_prefix_length(one.token_ids, other.token_ids)
    if one.routed_experts is None and other.routed_experts is None:
        return count
    compared = min(count, len(one) - 1, len(other) - 1)
    same = same_routing(one.routed_experts, other.routed_experts, compared)
    return count if same == compared else same  # if all compared tokens agree, the last token is shared too


def _between_trajectories(rows: Sequence[Row], lengths: Int64, shared: Int64, budget: int) -> list[bool]:
    """For each row, True if the forest may be cut before that row. A trajectory that fits into the budget is not
    cut."""
    names = [row.sample.trajectory_id for row in rows]
    firsts = [i for i, (before, name) in enumerate(zip([None, *names], names, strict=False)) if before != name]
    may_cut = [True] * len(rows)
    for first, end in pairwise([*firsts, len(rows)]):
        if lengths[first:end].sum() - shared[first + 1 : end].sum() <= budget:
            may_cut[first + 1 : end] = [False] * (end - first - 1)
    return may_cut


def _cuts(lengths: Int64, shared: Int64, may_cut: Sequence[bool], budget: int) -> list[int]:
    """The boundaries of pieces, from 0 to the number of rows: the cuts that repeat the fewest tokens and, among these,
    make the fewest pieces.

    A dynamic program. A cut before row i repeats `shared[i]` tokens. `best[i]` is the least cost, (repeated tokens,
    pieces), of the rows before i. A later start makes a piece smaller, so the possible starts form a sliding window,
    and a monotonic queue yields the minimum in linear time.
    """
    count = len(lengths)
    added = np.append(0, np.cumsum(lengths - shared)).tolist()
    repeats = shared.tolist()
    best, begins = [(0, 0)], [0]
    cost: list[tuple[int, int]] = []
    window: deque[int] = deque()  # possible starts of the last piece, by increasing row and cost
    for end in range(1, count + 1):
        start = end - 1
        repeated, pieces = best[start]
        cost.append((repeated + repeats[start], pieces + 1))
        if may_cut[start]:
            while window and cost[window[-1]] >= cost[start]:
                window.pop()
            window.append(start)
        while len(window) > 1 and repeats[window[0]] + added[end] - added[window[0]] > budget:
            window.popleft()
        best.append(cost[window[0]])
        begins.append(window[0])
    cuts = [count]
    while cuts[-1]:
        cuts.append(begins[cuts[-1]])
    return cuts[::-1]


def repeated_tokens(batches: Sequence[Sequence[Row]]) -> list[int]:
    """For each batch, how many of its tokens an earlier batch also computes. Rows are in the order of `in_order`.

    Among all earlier rows, a neighbour in sorted order shares the longest prefix; `bisect` finds it.
    """
    words = _words([row for rows in batches for row in rows])
    all_keys = iter(_keys([row for rows in batches for row in rows]))
    known: list[bytes] = []
    counts = []
    for rows in batches:
        keys = [next(all_keys) for _ in rows]
        count = 0
        for key, shared in zip(keys, shared_tokens(rows).tolist(), strict=True):
            at = bisect(known, key)
            near = [_common_tokens(key, other, words) for other in known[max(0, at - 1) : at + 1]]
            count += max(0, max(near, default=0) - shared)
        counts.append(count)
        known = sorted(known + keys)
    return counts


def lay_tree(rows: Sequence[Row], num_repeated_tokens: int) -> MicroBatch:
    """A micro-batch of these rows, in the order of `in_order`, as one forest."""
    shared = shared_tokens(rows)
    lengths = lengths_of(rows)
    new = lengths - shared
    begins = np.cumsum(new) - new
    total = int(new.sum())
    path = np.empty(int(lengths.max()), dtype=np.int32)
    ends = np.full(total, total, dtype=np.int32)
    sources, places, deepest = [], [], 0
    for row, length, common, begin in zip(rows, lengths.tolist(), shared.tolist(), begins.tolist(), strict=True):
        ends[path[common:deepest]] = begin  # the subtrees on the branch that this sample leaves end here
        path[common:length] = np.arange(begin, begin + length - common)
        deepest = length
        sources.append(path[row.sample.trained_places() - 1])
        places.append(path[:length].astype(np.int64))
    whole = {row.sample.trajectory_id: row.trajectory_length for row in rows}
    index = np.arange(total, dtype=np.int32)
    return MicroBatch(
        input_ids=np.concatenate([row.sample.token_ids[c:] for row, c in zip(rows, shared.tolist(), strict=True)]),
        position_ids=(index - np.repeat(begins - shared, new)).astype(np.int32),
        starts=index,
        ends=ends,
        targets=targets_of(rows, sources=sources, trajectory_ids=tuple(whole)),
        trajectory_ids=tuple(whole),
        trajectory_lengths=np.array(list(whole.values()), dtype=np.int32),
        routed_experts=experts_of(rows, places, total),
        is_rows=not shared.any(),
        num_repeated_tokens=num_repeated_tokens,
    )
