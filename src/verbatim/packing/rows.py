"""Lay training samples out as rows of micro-batches, first-fit-decreasing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.types import Float32, Int32, MicroBatch, Targets, TrainingSample


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """A sample and where it stands in its trajectory."""

    sample: TrainingSample
    """What is laid out."""
    offset: int
    """Tokens of the trajectory's samples before this one."""
    trajectory_length: int
    """Tokens of all the trajectory's samples."""


def pack_rows(
    samples: Sequence[TrainingSample], *, micro_batch_tokens: int, keep_whole: bool
) -> list[MicroBatch]:
    """Micro-batches of whole samples, in which every trained token is a target exactly once.

    Each sample is a row with positions from 0. Samples without a trained token are not laid out, but count in the
    offsets and the length of their trajectory. The result is a function of the samples and their order alone.

    Example: one sample `token_ids = [1, 2, 3, 4, 5]` with tokens 3 and 5 trained gives
    `source_positions = [1, 3]`, `target_ids = [3, 5]`, `offsets = [2, 4]`.

    Args:
        samples: The samples of one trajectory share its `trajectory_id`; their order among each other is the order
            in which they are laid one after the other for losses that see a trajectory whole.
        micro_batch_tokens: Most tokens of a micro-batch; a longer sample is alone in its own.
        keep_whole: Keep all samples of a trajectory in one micro-batch, where together they fit.
    """
    items = _items(_rows(samples), micro_batch_tokens, keep_whole)
    return [_micro_batch(rows) for rows in _first_fit_decreasing(items, micro_batch_tokens)]


def _rows(samples: Sequence[TrainingSample]) -> list[_Row]:
    lengths: dict[str, int] = {}
    offsets = []
    for sample in samples:
        offsets.append(lengths.get(sample.trajectory_id, 0))
        lengths[sample.trajectory_id] = offsets[-1] + len(sample)
    return [
        _Row(sample=sample, offset=offset, trajectory_length=lengths[sample.trajectory_id])
        for sample, offset in zip(samples, offsets, strict=True)
        if sample.num_trained_tokens
    ]


def _num_tokens(rows: list[_Row]) -> int:
    return sum(len(row.sample) for row in rows)


def _items(rows: list[_Row], budget: int, keep_whole: bool) -> list[list[_Row]]:
    """What is placed as one: a trajectory's rows where they are to stay together and can, single rows otherwise."""
    if not keep_whole:
        return [[row] for row in rows]
    by_trajectory: dict[str, list[_Row]] = {}
    for row in rows:
        by_trajectory.setdefault(row.sample.trajectory_id, []).append(row)
    items: list[list[_Row]] = []
    for together in by_trajectory.values():
        items.extend([together] if _num_tokens(together) <= budget else [[row] for row in together])
    return items


def _first_fit_decreasing(items: list[list[_Row]], budget: int) -> list[list[_Row]]:
    bins: list[list[_Row]] = []
    free: list[int] = []
    for item in sorted(items, key=_num_tokens, reverse=True):  # stable: equal sizes keep their order
        size = _num_tokens(item)
        place = next((i for i, room in enumerate(free) if size <= room), None)
        if place is None:
            bins.append([])
            free.append(budget)
            place = len(bins) - 1
        bins[place].extend(item)
        free[place] -= size
    return bins


def _micro_batch(rows: list[_Row]) -> MicroBatch:
    lengths = np.array([len(row.sample) for row in rows], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    index = np.arange(ends[-1], dtype=np.int32)
    whole = {row.sample.trajectory_id: row.trajectory_length for row in rows}
    return MicroBatch(
        input_ids=np.concatenate([row.sample.token_ids for row in rows]),
        position_ids=index - np.repeat(ends - lengths, lengths),
        starts=index,
        ends=np.repeat(ends, lengths),
        targets=_targets(rows, starts=ends - lengths, trajectory_ids=tuple(whole)),
        trajectory_ids=tuple(whole),
        trajectory_lengths=np.array(list(whole.values()), dtype=np.int32),
    )


def _targets(rows: list[_Row], *, starts: Int32, trajectory_ids: tuple[str, ...]) -> Targets:
    number = {trajectory_id: i for i, trajectory_id in enumerate(trajectory_ids)}
    places = [np.flatnonzero(row.sample.loss_mask).astype(np.int32) for row in rows]

    def trained(name: str) -> list[Float32]:
        return [getattr(row.sample, name)[at] for row, at in zip(rows, places, strict=True)]

    with_teacher = {row.sample.teacher_logprobs is not None for row in rows}
    assert len(with_teacher) == 1, "either all samples of a batch have teacher logprobs or none has"
    return Targets(
        source_positions=np.concatenate([start + at - 1 for start, at in zip(starts, places, strict=True)]),
        target_ids=np.concatenate(trained("token_ids")),
        temperatures=np.concatenate(trained("temperatures")),
        inference_logprobs=np.concatenate(trained("logprobs")),
        advantages=np.concatenate(trained("advantages")),
        chunk_ids=np.concatenate(trained("chunk_ids")),
        trajectories=np.repeat(
            np.array([number[row.sample.trajectory_id] for row in rows], dtype=np.int32),
            [len(at) for at in places],
        ),
        offsets=np.concatenate([row.offset + at for row, at in zip(rows, places, strict=True)]),
        teacher_logprobs=np.concatenate(trained("teacher_logprobs")) if with_teacher == {True} else None,
    )
