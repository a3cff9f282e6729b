"""Sends micro-batches from rank 0 to the ranks that train on them, array by array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verbatim.core.types import KeptSets, MicroBatch, RoutedExperts, Targets
from verbatim.trainer.parallel.ranks import Ranks

_TOKENS = ("input_ids", "position_ids", "starts", "ends", "trajectory_lengths")
_TARGETS = (
    "source_positions",
    "target_ids",
    "temperatures",
    "inference_logprobs",
    "advantages",
    "chunk_ids",
    "trajectories",
    "offsets",
)


def hand_out(ranks: Ranks, dealt: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
    """On rank 0: send every rank its micro-batches, and return rank 0's micro-batches. `dealt` lists the micro-batches
    by rank, or by group of neighbouring ranks that all get the same micro-batches."""
    size = ranks.size // len(dealt)
    for rank in range(1, ranks.size):
        mine = dealt[rank // size]
        ranks.send(
            [_head(micro_batch) for micro_batch in mine],
            [array for micro_batch in mine for array in _arrays(micro_batch)],
            rank,
        )
    return list(dealt[0])


def take_in(ranks: Ranks) -> list[MicroBatch]:
    """On ranks other than 0: receive this rank's micro-batches from `hand_out`."""
    heads, arrays = ranks.receive(0)
    found = []
    for head in heads:
        # Number of arrays per micro-batch, in the order of `_arrays`; experts and kept sets have two arrays each.
        count = len(_TOKENS) + len(_TARGETS) + len(head["streams"]) + 2 * (bool(head["experts"]) + head["kept"])
        found.append(_made(head, arrays[:count]))
        del arrays[:count]
    return found


def _head(micro_batch: MicroBatch) -> dict[str, Any]:
    """Everything in a micro-batch that is not an array, as plain JSON values."""
    return {
        "trajectory_ids": list(micro_batch.trajectory_ids),
        "is_rows": micro_batch.is_rows,
        "num_repeated_tokens": micro_batch.num_repeated_tokens,
        "streams": list(micro_batch.targets.logprob_streams),
        "kept": micro_batch.targets.kept_sets is not None,
        "experts": None if micro_batch.routed_experts is None else micro_batch.routed_experts.experts.dtype.name,
    }


def _arrays(micro_batch: MicroBatch) -> list[np.ndarray]:
    """The arrays of a micro-batch, in the order in which `_made` reads them."""
    targets = micro_batch.targets
    return [
        *(getattr(micro_batch, name) for name in _TOKENS),
        *(getattr(targets, name) for name in _TARGETS),
        *targets.logprob_streams.values(),
        *([] if targets.kept_sets is None else [targets.kept_sets.ids, targets.kept_sets.offsets]),
        *_bytes(micro_batch.routed_experts),
    ]


def _bytes(routed: RoutedExperts | None) -> list[np.ndarray]:
    """Recorded experts as bytes, because gloo sends neither bool nor uint16."""
    if routed is None:
        return []
    return [np.ascontiguousarray(array).view(np.uint8) for array in (routed.experts, routed.known)]


def _experts(dtype: str | None, arrays: Sequence[np.ndarray]) -> RoutedExperts | None:
    if dtype is None:
        return None
    return RoutedExperts(experts=arrays[0].view(dtype), known=arrays[1].view(np.bool_))


def _made(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> MicroBatch:
    """The micro-batch with this `_head` and these `_arrays`."""
    tokens, rest = arrays[: len(_TOKENS)], arrays[len(_TOKENS) :]
    targets, rest = rest[: len(_TARGETS)], rest[len(_TARGETS) :]
    streams, rest = rest[: len(head["streams"])], rest[len(head["streams"]) :]
    kept, rest = rest[: 2 * head["kept"]], rest[2 * head["kept"] :]
    return MicroBatch(
        **dict(zip(_TOKENS, tokens, strict=True)),
        targets=Targets(
            **dict(zip(_TARGETS, targets, strict=True)),
            logprob_streams=dict(zip(head["streams"], streams, strict=True)),
            kept_sets=KeptSets(ids=kept[0], offsets=kept[1]) if head["kept"] else None,
        ),
        trajectory_ids=tuple(head["trajectory_ids"]),
        is_rows=head["is_rows"],
        routed_experts=_experts(head["experts"], rest),
        num_repeated_tokens=head["num_repeated_tokens"],
    )
