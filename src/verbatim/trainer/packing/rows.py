"""Packs training samples as rows into micro-batches by first-fit-decreasing bin packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.trainer.packing.layout import Row, by_trajectory, experts_of, first_fit_decreasing, rows_of, targets_of


def pack_rows(samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool) -> list[MicroBatch]:
    """Pack samples as rows; every trained token is a target exactly once.

    Each sample is a row with positions from 0. Samples without a trained token are not computed, but still count in
    their trajectory's offsets and length. The result depends only on the samples and their order.

    Example: one sample `token_ids = [1, 2, 3, 4, 5]` with tokens 3 and 5 trained gives
    `source_positions = [1, 3]`, `target_ids = [3, 5]`, `offsets = [2, 4]`.

    Args:
        samples: The samples. The samples of one trajectory share its `trajectory_id`, and a loss on whole trajectories
            sees them concatenated in this order.
        micro_batch_tokens: Maximum tokens in a micro-batch; a longer sample is alone in its micro-batch.
        keep_whole: Keep all samples of a trajectory in one micro-batch if they fit.

    Raises:
        UsageError: two trajectories have the same id.
    """
    items = row_items(rows_of(samples, keep_whole=keep_whole), micro_batch_tokens, keep_whole)
    sizes = [_num_tokens(item) for item in items]
    return [lay_rows(rows) for rows in first_fit_decreasing(items, sizes, micro_batch_tokens)]


def _num_tokens(rows: list[Row]) -> int:
    return sum(len(row.sample) for row in rows)


def row_items(rows: list[Row], budget: int, keep_whole: bool) -> list[list[Row]]:
    """The items to place: all rows of a trajectory if they must stay together and fit, otherwise single rows."""
    if not keep_whole:
        return [[row] for row in rows]
    items: list[list[Row]] = []
    for together in by_trajectory(rows):
        items.extend([together] if _num_tokens(together) <= budget else [[row] for row in together])
    return items


def lay_rows(rows: Sequence[Row]) -> MicroBatch:
    """A micro-batch of these rows, concatenated."""
    lengths = np.array([len(row.sample) for row in rows], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    index = np.arange(ends[-1], dtype=np.int32)
    whole = {row.sample.trajectory_id: row.trajectory_length for row in rows}
    starts = (ends - lengths).tolist()
    sources = [start + row.sample.trained_places() - 1 for row, start in zip(rows, starts, strict=True)]
    return MicroBatch(
        input_ids=np.concatenate([row.sample.token_ids for row in rows]),
        position_ids=index - np.repeat(ends - lengths, lengths),
        starts=index,
        ends=np.repeat(ends, lengths),
        targets=targets_of(rows, sources=sources, trajectory_ids=tuple(whole)),
        trajectory_ids=tuple(whole),
        trajectory_lengths=np.array(list(whole.values()), dtype=np.int32),
        routed_experts=experts_of(rows, np.split(index.astype(np.int64), ends[:-1]), int(ends[-1])),
    )
