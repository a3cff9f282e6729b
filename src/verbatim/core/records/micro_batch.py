"""Defines the micro-batch: the tokens of one forward pass and the targets predicted in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verbatim.core.records.experts import RoutedExperts
from verbatim.core.records.fields import Float32
from verbatim.core.records.kept import KeptSets
from verbatim.core.token_tree import Int32


@dataclass(frozen=True, kw_only=True, eq=False)
class Targets:
    """The prediction targets of a micro-batch; all arrays are parallel over its M trained tokens.

    Several targets may share one source position (the children of a tree node).
    """

    source_positions: Int32
    """Index into `input_ids` of the token whose hidden state predicts the target: int32 [M]."""
    target_ids: Int32
    """The token ids to predict: int32 [M]."""
    temperatures: Float32
    """Temperature at which each target was sampled: float32 [M]."""
    inference_logprobs: Float32
    """Logprobs of the engine that sampled the targets: float32 [M]; NaN where the logprob is missing (sft only)."""
    advantages: Float32
    """Advantage of each target: float32 [M]."""
    chunk_ids: Int32
    """Turn index of each target: int32 [M]."""
    trajectories: Int32
    """Index of the target's trajectory in `MicroBatch.trajectory_ids`: int32 [M]."""
    offsets: Int32
    """Index of the target in the concatenated samples of its trajectory: int32 [M]."""
    logprob_streams: Mapping[str, Float32] = field(default_factory=dict)
    """Logprobs of other models, by the model's role ("teacher"): float32 [M]."""
    kept_sets: KeptSets | None = None
    """The kept sets of the M targets, or None if nothing was cut."""

    def __len__(self) -> int:
        return len(self.target_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The tokens and targets of one forward pass, in a form that is the same for rows and trees.

    Token u attends to the tokens k with `starts[k] <= starts[u] < ends[k]` and k <= u (Euler-tour intervals of
    a forest in depth-first order). Rows are the special case of a forest of paths: then `starts` counts up and
    `ends[k]` is the end of k's row.

    Example: the rows `[7, 8]` and `[9]` are `input_ids = [7, 8, 9]`, `position_ids = [0, 1, 0]`,
    `starts = [0, 1, 2]`, `ends = [2, 2, 3]`.
    """

    input_ids: Int32
    """The tokens of the pass: int32 [U]."""
    position_ids: Int32
    """Depth of each token in its row or tree: int32 [U]."""
    starts: Int32
    """Euler-tour entry of each token: int32 [U]; in depth-first order it equals the token's index."""
    ends: Int32
    """Euler-tour exit of each token: int32 [U]."""
    targets: Targets
    """The prediction targets."""
    trajectory_ids: tuple[str, ...]
    """Ids of the trajectories with targets in this micro-batch."""
    trajectory_lengths: Int32
    """Length of each trajectory in `trajectory_ids`, counting the tokens of all its samples: int32
    [len(trajectory_ids)]."""
    routed_experts: RoutedExperts | None = None
    """In a mixture of experts, the experts that must process the U tokens, or None if no experts were recorded."""
    is_rows: bool = True
    """True if every tree is a path; attention kernels for rows rely on this."""
    num_repeated_tokens: int = 0
    """Number of tokens that an earlier micro-batch of the same optimizer step also computes, because the forest was
    cut."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the forward pass."""
        return len(self.input_ids)

    @property
    def row_lengths(self) -> Int32:
        """Length of each row, if `is_rows`: int32 [R]."""
        assert self.is_rows
        (first,) = np.nonzero(self.position_ids == 0)
        return np.diff(np.append(first, len(self.position_ids))).astype(np.int32)
