"""Contains what the packers share: samples with their place in the trajectory, bin packing, and the targets of a
micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import UsageError
from verbatim.core.records.experts import RoutedExperts
from verbatim.core.records.samples import assert_same_streams
from verbatim.core.types import Float32, Int32, KeptSets, Targets, TrainingSample


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A sample and its place in its trajectory."""

    sample: TrainingSample
    """The sample."""
    offset: int
    """Number of tokens in the trajectory's earlier samples."""
    trajectory_length: int
    """Number of tokens in all of the trajectory's samples."""


def by_trajectory(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each trajectory, in the order of their first rows."""
    together: dict[str, list[Row]] = {}
    for row in rows:
        together.setdefault(row.sample.trajectory_id, []).append(row)
    return list(together.values())


def rows_of(samples: Sequence[TrainingSample], *, keep_whole: bool = False) -> list[Row]:
    """A row for each sample with a trained token. Samples without a trained token still count in the offsets.

    Raises:
        UsageError: two trajectories have the same id, so a loss would treat them as one.
    """
    _refuse_two_of_one_id(samples, keep_whole)
    lengths: dict[str, int] = {}
    offsets = []
    for sample in samples:
        offsets.append(lengths.get(sample.trajectory_id, 0))
        lengths[sample.trajectory_id] = offsets[-1] + len(sample)
    return [
        Row(sample=sample, offset=offset, trajectory_length=lengths[sample.trajectory_id])
        for sample, offset in zip(samples, offsets, strict=True)
        if sample.num_trained_tokens
    ]


def _refuse_two_of_one_id(samples: Sequence[TrainingSample], keep_whole: bool) -> None:
    """Refuse two trajectories with the same id. Token-level losses do not need ids, so without `keep_whole`, samples
    without an id are allowed."""
    known: set[tuple[str, int]] = set()
    for sample in samples:
        name = sample.trajectory_id
        if sample.part >= 0 and (name or keep_whole):
            if (name, sample.part) in known:
                raise UsageError(
                    f"two trajectories of one batch have the trajectory_id {name!r}, and a loss would see them as one; "
                    "give each an id of its own before build_samples: trajectory.replace(trajectory_id=...)"
                )
            known.add((name, sample.part))


def token_order(sample: TrainingSample) -> bytes:
    """Key for sorting samples by their token ids. Big-endian, so that bytes compare like the numbers they encode."""
    return sample.token_ids.astype(">i4").tobytes()


def first_fit_decreasing(items: Sequence[Sequence[Row]], sizes: Sequence[int], budget: int) -> list[list[Row]]:
    """Bin packing: each item, largest first, goes into the first bin with room. An item above the budget is alone in
    its bin."""
    bins: list[list[Row]] = []
    free: list[int] = []
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda pair: -pair[0]):  # stable
        place = next((i for i, room in enumerate(free) if size <= room), None)
        if place is None:
            bins.append([])
            free.append(budget)
            place = len(bins) - 1
        bins[place].extend(item)
        free[place] -= size
    return bins


def experts_of(rows: Sequence[Row], places: Sequence[NDArray[np.int64]], num_tokens: int) -> RoutedExperts | None:
    """The recorded experts of a micro-batch's tokens; None if no row has recorded experts.

    Args:
        rows: The rows of the micro-batch.
        places: The indices of each row's tokens in the micro-batch: int64.
        num_tokens: Number of tokens in the micro-batch.
    """
    recorded = [(row.sample.routed_experts, at) for row, at in zip(rows, places, strict=True)]
    first = next((routed.experts for routed, _ in recorded if routed is not None), None)
    if first is None:
        return None
    found = RoutedExperts.of_none(num_tokens, first)
    for routed, at in recorded:
        if routed is not None:
            assert routed.experts.shape[1:] == first.shape[1:], "recorded experts of two models in one batch"
            found.add(at[routed.known], routed.experts[routed.known])
    return found


def targets_of(rows: Sequence[Row], *, sources: Sequence[Int32], trajectory_ids: tuple[str, ...]) -> Targets:
    """The targets of a micro-batch: the trained tokens of all rows.

    Args:
        rows: The rows of the micro-batch.
        sources: One array per row: for each trained token, the position that the token before it has in the
            micro-batch.
        trajectory_ids: The trajectory ids; a target refers to its trajectory by the index in this tuple.
    """
    number = {trajectory_id: i for i, trajectory_id in enumerate(trajectory_ids)}
    places = [row.sample.trained_places().astype(np.int32) for row in rows]

    def trained(name: str) -> list[Float32]:
        return [row.sample.trained(name) for row in rows]

    assert_same_streams([row.sample for row in rows])
    streams = {
        name: [row.sample.logprob_streams[name][at] for row, at in zip(rows, places, strict=True)]
        for name in rows[0].sample.logprob_streams
    }
    return Targets(
        source_positions=np.concatenate(list(sources)).astype(np.int32),
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
        logprob_streams={name: np.concatenate(values) for name, values in streams.items()},
        kept_sets=KeptSets.joined(
            [
                None if row.sample.kept_sets is None else row.sample.kept_sets.picked(at)
                for row, at in zip(rows, places, strict=True)
            ],
            [len(at) for at in places],
        ),
    )
