"""Splits a batch into disjoint parts, one per optimizer step, without splitting a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.types import TrainingSample


def split_batch(samples: Sequence[TrainingSample], num_parts: int) -> list[list[TrainingSample]]:
    """Split a batch into at most `num_parts` parts with about the same number of trained tokens. The result depends on
    the batch alone.

    Trajectories are assigned, largest first, to the part with the fewest trained tokens so far. Within a part, samples
    keep the batch's order. Parts without a trained token are dropped: an optimizer step on such a part would have no
    gradient.

    Example: trajectories of 5, 4, 3 and 2 trained tokens in two parts are (5, 2) and (4, 3).
    """
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.trajectory_id] = tokens.get(sample.trajectory_id, 0) + sample.num_trained_tokens
    load = [0] * num_parts
    part_of: dict[str, int] = {}
    for trajectory_id in sorted(tokens, key=lambda key: -tokens[key]):  # stable: ties keep the batch's order
        part = load.index(min(load))
        part_of[trajectory_id] = part
        load[part] += tokens[trajectory_id]
    parts: list[list[TrainingSample]] = [[] for _ in range(num_parts)]
    for sample in samples:
        parts[part_of[sample.trajectory_id]].append(sample)
    return [part for part, trained in zip(parts, load, strict=True) if trained]
