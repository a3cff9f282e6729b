"""Defines the training sample: token ids, and a mask of the tokens that are trained."""

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
    """A run of tokens with what is trained marked; all arrays are parallel over its length L.

    `teacher_logprobs` is an argument too: the stream "teacher".

    Example: prompt `[1, 2]`, completion `[3]`, a tool's reply `[4]`, completion `[5]` gives
    `token_ids = [1, 2, 3, 4, 5]`, `loss_mask = [F, F, T, F, T]`, `chunk_ids = [-1, -1, 0, -1, 1]`.
    """

    token_ids: Int32
    """int32 [L]."""
    loss_mask: Bool
    """bool [L]; True where a sampled token is trained."""
    logprobs: Float32
    """Inference logprobs, float32 [L]; NaN where nothing was sampled, or the logprob is missing."""
    advantages: Float32
    """float32 [L]; 0 outside the mask."""
    chunk_ids: Int32
    """The turn's index, int32 [L]; -1 outside the mask."""
    policy_versions: Int32
    """int32 [L]; -1 outside the mask, or unknown."""
    temperatures: Float32
    """float32 [L]; 1 outside the mask."""
    logprob_streams: Mapping[str, Float32]
    """Logprobs that other models give to the tokens under the mask, by the model's role ("teacher"): float32 [L]."""
    routed_experts: RoutedExperts | None = None
    """The experts of a mixture that computed its tokens when it was sampled, of L tokens; None: not recorded."""
    kept_sets: KeptSets | None = None
    """The ids among which each token was drawn, of L tokens; empty outside the mask. None: nothing was cut."""
    trajectory_id: str = ""
    """The trajectory it comes from."""
    group_id: str = ""
    """That trajectory's group."""
    env: str = ""
    """Its environment."""
    part: int = -1
    """Which of its trajectory's samples it is, from 0; -1: unknown. Two samples of one `trajectory_id` and part are of
    two trajectories."""

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
        assert not (len(loss_mask) and loss_mask[0]), "the first token has no context to be trained in"
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
        """The sample of these spans of trained tokens, in ascending order. Its arrays are made when they are read: of
        what `__init__` checks, that they are parallel follows from how they are made, and the rest is checked here."""
        sample = cls.__new__(cls)
        assert not spans or (spans[0].start > 0 and spans[-1].end <= len(token_ids)), "spans outside of the sample"
        if len(spans) > 1:  # most samples of a broken trajectory have one
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
            """An array that follows from the spans, when it is read first."""
            if name not in OUTSIDE or self.spans is None:
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            array = vars(self)[name] = expanded(self.spans, name, len(self))
            return array

    @property
    def spans(self) -> tuple[Span, ...] | None:
        """The spans that it was made of; None of a sample that was made of arrays."""
        spans: tuple[Span, ...] | None = vars(self).get("_spans")
        return spans

    def with_streams(self, streams: Mapping[str, Float32]) -> Self:
        """The same sample with further logprob streams."""
        for name, stream in streams.items():
            assert stream.shape == self.token_ids.shape, f"{name}: {stream.shape} != {self.token_ids.shape}"
        sample = copy.copy(self)
        further = {name: read_only(array) for name, array in streams.items()}
        fill(sample, logprob_streams={**self.logprob_streams, **further})
        return sample

    def trained_places(self) -> NDArray[np.int64]:
        """The places of the trained tokens, ascending: int64 [T]."""
        return np.flatnonzero(self.loss_mask) if self.spans is None else trained_places(self.spans)

    def trained(self, name: str) -> NDArray[Any]:
        """One of its arrays, by name, at the trained tokens alone: [T]."""
        if self.spans is None or name not in OUTSIDE:
            return getattr(self, name)[self.trained_places()]  # type: ignore[no-any-return]
        return of_trained(self.spans, name)

    def trained_chunks(self) -> Iterator[tuple[int, int]]:
        """The turns that have trained tokens, in the order of these: index and number of tokens.

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
        """The stream "teacher": float32 [L]; None without a teacher."""
        return self.logprob_streams.get(TEACHER)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens under the mask."""
        if (spans := self.spans) is not None:
            return sum([span[1] - span[0] for span in spans])
        return int(np.count_nonzero(self.loss_mask))


def assert_same_streams(samples: Sequence[TrainingSample]) -> None:
    """Stop where a stream is there for some samples of a batch and missing for others."""
    found = {frozenset(sample.logprob_streams) for sample in samples}
    assert len(found) <= 1, f"the samples of a batch have different logprob streams: {[sorted(f) for f in found]}"
