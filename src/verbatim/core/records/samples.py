"""Defines the training sample: token ids, and a mask of the trained tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from verbatim.core.records.experts import RoutedExperts
from verbatim.core.records.fields import NO_STREAMS, TEACHER, Bool, Float32, fill, read_only
from verbatim.core.records.kept import KeptSets
from verbatim.core.records.spans import OUTSIDE, Span, expanded, of_trained, trained_places
from verbatim.core.token_tree import Int32

_PER_TOKEN = ("token_ids", *OUTSIDE)


@dataclass(frozen=True, kw_only=True, eq=False, init=False)
class TrainingSample:
    """A token sequence with a mask of its trained tokens; all arrays are parallel over its length L.

    The constructor also takes `teacher_logprobs`, which becomes the stream "teacher".

    Example: prompt `[1, 2]`, completion `[3]`, a tool's reply `[4]`, completion `[5]` gives
    `token_ids = [1, 2, 3, 4, 5]`, `loss_mask = [F, F, T, F, T]`, `chunk_ids = [-1, -1, 0, -1, 1]`.
    """

    token_ids: Int32
    """The tokens: int32 [L]."""
    loss_mask: Bool
    """bool [L]; True where a sampled token is trained."""
    logprobs: Float32
    """Inference logprobs, float32 [L]; NaN where no token was sampled or the logprob is missing."""
    advantages: Float32
    """Advantages, float32 [L]; 0 outside the mask."""
    chunk_ids: Int32
    """Index of the turn that sampled the token, int32 [L]; -1 outside the mask."""
    policy_versions: Int32
    """Policy version that sampled the token, int32 [L]; -1 outside the mask or if unknown."""
    temperatures: Float32
    """Sampling temperature, float32 [L]; 1 outside the mask."""
    logprob_streams: Mapping[str, Float32]
    """Logprobs of other models for the tokens under the mask, by the model's role ("teacher"): float32 [L]."""
    routed_experts: RoutedExperts | None = None
    """In a mixture of experts, the experts that processed the L tokens during sampling, or None if they were not
    recorded."""
    kept_sets: KeptSets | None = None
    """The kept sets of the L tokens, empty outside the mask, or None if nothing was cut."""
    trajectory_id: str = ""
    """Id of the sample's trajectory."""
    group_id: str = ""
    """Id of the trajectory's group."""
    env: str = ""
    """Name of the sample's environment."""
    part: int = -1
    """Index of this sample among the samples of its trajectory; -1 if unknown. Two samples with the same
    `trajectory_id` and the same part belong to different trajectories."""

    def __init__(
        self,
        *,
        token_ids: Int32,
        loss_mask: Bool,
        logprobs: Float32,
        advantages: Float32,
        chunk_ids: Int32,
        policy_versions: Int32,
        temperatures: Float32,
        teacher_logprobs: Float32 | None = None,
        logprob_streams: Mapping[str, Float32] = NO_STREAMS,
        routed_experts: RoutedExperts | None = None,
        kept_sets: KeptSets | None = None,
        trajectory_id: str = "",
        group_id: str = "",
        env: str = "",
        part: int = -1,
    ) -> None:
        streams = dict(logprob_streams)
        if teacher_logprobs is not None:
            streams[TEACHER] = teacher_logprobs
        arrays = dict(
            zip(
                _PER_TOKEN,
                (token_ids, loss_mask, logprobs, advantages, chunk_ids, policy_versions, temperatures),
                strict=True,
            )
        )
        for name, array in (*arrays.items(), *streams.items()):
            assert array.shape == token_ids.shape, f"{name}: {array.shape} != {token_ids.shape}"
        assert routed_experts is None or len(routed_experts) == len(token_ids), "experts of another sample"
        assert kept_sets is None or len(kept_sets) == len(token_ids), "kept sets of another sample"
        assert not (len(loss_mask) and loss_mask[0]), "the first token has no context that could predict it"
        fill(
            self,
            **{name: read_only(array) for name, array in arrays.items()},
            logprob_streams={name: read_only(array) for name, array in streams.items()},
            routed_experts=routed_experts,
            kept_sets=kept_sets,
            trajectory_id=trajectory_id,
            group_id=group_id,
            env=env,
            part=part,
        )

    @classmethod
    def of_spans(
        cls,
        token_ids: Int32,
        spans: Sequence[Span],
        *,
        routed_experts: RoutedExperts | None = None,
        kept_sets: KeptSets | None = None,
        trajectory_id: str = "",
        group_id: str = "",
        env: str = "",
        part: int = -1,
    ) -> Self:
        """Make a sample from spans of trained tokens, in ascending order. The sample's arrays are built when they are
        first read and are parallel by construction; everything else that `__init__` checks is checked here."""
        sample = cls.__new__(cls)
        assert not spans or (spans[0].start > 0 and spans[-1].end <= len(token_ids)), "spans outside of the sample"
        if len(spans) > 1:  # this skips the loop: after breaks, most samples have a single span
            assert all(one.end <= other.start for one, other in pairwise(spans)), "spans that overlap"
        assert routed_experts is None or len(routed_experts) == len(token_ids), "experts of another sample"
        assert kept_sets is None or len(kept_sets) == len(token_ids), "kept sets of another sample"
        vars(sample).update(
            token_ids=read_only(token_ids),
            _spans=tuple(spans),
            logprob_streams={},
            routed_experts=routed_experts,
            kept_sets=kept_sets,
            trajectory_id=trajectory_id,
            group_id=group_id,
            env=env,
            part=part,
        )
        return sample

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An array that is built from the spans when it is first read."""
            if name not in OUTSIDE or self.spans is None:
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            array = vars(self)[name] = expanded(self.spans, name, len(self))
            return array

    @property
    def spans(self) -> tuple[Span, ...] | None:
        """The spans that the sample was made from, or None if it was made from arrays."""
        spans: tuple[Span, ...] | None = vars(self).get("_spans")
        return spans

    def with_streams(self, streams: Mapping[str, Float32]) -> Self:
        """A copy of the sample with additional logprob streams."""
        for name, stream in streams.items():
            assert stream.shape == self.token_ids.shape, f"{name}: {stream.shape} != {self.token_ids.shape}"
        sample = copy.copy(self)
        further = {name: read_only(array) for name, array in streams.items()}
        fill(sample, logprob_streams={**self.logprob_streams, **further})
        return sample

    def trained_places(self) -> NDArray[np.int64]:
        """Indices of the trained tokens, ascending: int64 [T]."""
        return np.flatnonzero(self.loss_mask) if self.spans is None else trained_places(self.spans)

    def trained(self, name: str) -> NDArray[Any]:
        """The values of the array `name` of this sample at the trained tokens: [T]."""
        if self.spans is None or name not in OUTSIDE:
            return getattr(self, name)[self.trained_places()]  # type: ignore[no-any-return]
        return of_trained(self.spans, name)

    def trained_chunks(self) -> Iterator[tuple[int, int]]:
        """For each turn with trained tokens, the pair (turn index, number of trained tokens), in the order of the
        tokens.

        Example: chunk ids `[-1, 0, 0, -1, 1]` give (0, 2) and (1, 1).
        """
        if self.spans is not None:
            for chunk, own in groupby(self.spans, key=attrgetter("chunk")):
                yield chunk, sum(span.end - span.start for span in own)
            return
        chunks = self.trained("chunk_ids")
        cuts = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(chunks)]
        yield from ((int(chunks[first]), last - first) for first, last in pairwise(cuts) if first < last)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def teacher_logprobs(self) -> Float32 | None:
        """The stream "teacher", float32 [L], or None without a teacher."""
        return self.logprob_streams.get(TEACHER)

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens under the mask."""
        if (spans := self.spans) is not None:
            return sum([span[1] - span[0] for span in spans])
        return int(np.count_nonzero(self.loss_mask))


def assert_same_streams(samples: Sequence[TrainingSample]) -> None:
    """Assert that all samples of a batch have the same logprob streams."""
    found = {frozenset(sample.logprob_streams) for sample in samples}
    assert len(found) <= 1, f"the samples of a batch have different logprob streams: {[sorted(f) for f in found]}"
