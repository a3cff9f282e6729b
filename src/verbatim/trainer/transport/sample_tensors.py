"""Serializes the samples of a batch to tensors and back, bit for bit.

Samples built from spans are sent as spans: token ids, the logprobs of trained tokens, and a few numbers per span, which
take at most 8 bytes per token. Samples built from arrays are sent as these arrays, which take 25 bytes per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.core.records.samples import assert_same_streams
from verbatim.core.records.spans import Span
from verbatim.core.types import KeptSets, RoutedExperts, TrainingSample

Parts = Sequence[NDArray[Any]]
"""A tensor as a list of arrays to concatenate along the first dimension, so that nothing is copied before writing."""

_ARRAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures")
_STREAM = "_logprobs"
"""Suffix of a logprob stream's tensor name: the stream "teacher" is stored in the tensor "teacher_logprobs"."""
_EXPERTS, _KNOWN = "routed_experts", "routed_experts_known"
"""Recorded experts, concatenated over the samples that have them."""
_KEPT_IDS, _KEPT_COUNTS = "kept_ids", "kept_counts"
"""Kept sets, concatenated over the samples that have them: all ids, and the number of ids per token."""
_NAMES = ("trajectory_id", "group_id", "env", "part")
_COUNTS, _PLACES, _NUMBERS, _SPAN_LOGPROBS = "span_counts", "span_places", "span_numbers", "span_sampled"
"""Spans of all S samples: spans per sample [S]; start, end, chunk, version and has-logprobs flag of each of the N spans
[N, 5]; advantage and temperature [N, 2]; the logprobs of spans that have them, concatenated."""


def samples_to_tensors(samples: Sequence[TrainingSample]) -> tuple[dict[str, Parts], dict[str, Any]]:
    """Return (1) the tensors and (2) a header of plain JSON values that describes them."""
    of_arrays = [sample for sample in samples if sample.spans is None]
    spans = [span for sample in samples for span in sample.spans or ()]
    tensors: dict[str, Parts] = {
        "lengths": [np.array([len(sample) for sample in samples], dtype=np.int32)],
        "token_ids": [sample.token_ids for sample in samples],
        **{name: [getattr(sample, name) for sample in of_arrays] for name in _ARRAYS[1:]},
        _COUNTS: [np.array([len(sample.spans or ()) for sample in samples], dtype=np.int32)],
        _PLACES: [np.array([(*span[:4], span.logprobs is not None) for span in spans], dtype=np.int32).reshape(-1, 5)],
        _NUMBERS: [np.array([(span.advantage, span.temperature) for span in spans], dtype=np.float32).reshape(-1, 2)],
        _SPAN_LOGPROBS: [span.logprobs for span in spans if span.logprobs is not None],
    }
    assert_same_streams(samples)
    for stream in samples[0].logprob_streams if samples else ():
        tensors[stream + _STREAM] = [sample.logprob_streams[stream] for sample in samples]
    routed = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    tensors |= {_EXPERTS: [r.experts for r in routed], _KNOWN: [r.known for r in routed]}
    kept = [sample.kept_sets for sample in samples if sample.kept_sets is not None]
    tensors |= {_KEPT_IDS: [k.ids for k in kept], _KEPT_COUNTS: [k.counts.astype(np.int32) for k in kept]}
    head = {
        "kept": [sample.kept_sets is not None for sample in samples],
        "routed": [sample.routed_experts is not None for sample in samples],
        "of_arrays": [sample.spans is None for sample in samples],
        **{name: [getattr(sample, name) for sample in samples] for name in _NAMES},
    }
    return {name: parts for name, parts in tensors.items() if parts}, head


def samples_from_tensors(tensors: Mapping[str, NDArray[Any]], head: Mapping[str, Any]) -> tuple[TrainingSample, ...]:
    """The inverse of `samples_to_tensors`, given concatenated tensors; empty tensors may be missing.

    Raises:
        KeyError, ValueError, TypeError: tensors and header do not describe samples.
    """
    lengths = tensors["lengths"]
    if not len(lengths):
        return ()
    of_arrays = np.array(head["of_arrays"], dtype=np.bool_)
    ids = _split(tensors["token_ids"], lengths)
    arrays = {name: iter(_split(tensors[name], lengths[of_arrays])) for name in _ARRAYS[1:] if name in tensors}
    streams = {
        name.removesuffix(_STREAM): iter(_split(array, lengths))
        for name, array in tensors.items()
        if name.endswith(_STREAM)
    }
    experts = _read_experts(tensors, lengths, head["routed"])
    kept = _read_kept(tensors, lengths, head["kept"])
    spans = iter(_read_spans(tensors))
    samples = []
    for i, is_array in enumerate(head["of_arrays"]):
        names = {name: head[name][i] for name in _NAMES} | {"routed_experts": experts[i], "kept_sets": kept[i]}
        own = next(spans)
        if is_array:
            fields: dict[str, Any] = {name: next(found) for name, found in arrays.items()}
            sample = TrainingSample(token_ids=ids[i], **fields, **names)
        else:
            sample = TrainingSample.of_spans(ids[i], own, **names)
        own_streams = {name: next(found) for name, found in streams.items()}
        samples.append(sample.with_streams(own_streams) if own_streams else sample)
    return tuple(samples)


def _read_spans(tensors: Mapping[str, NDArray[Any]]) -> list[list[Span]]:
    """The spans of each sample; an empty list for samples built from arrays."""
    places, numbers = tensors[_PLACES].tolist(), tensors[_NUMBERS].tolist()
    logprobs, at = tensors.get(_SPAN_LOGPROBS), 0
    spans = []
    for (start, end, chunk, version, is_known), (advantage, temperature) in zip(places, numbers, strict=True):
        known = None
        if is_known:
            assert logprobs is not None
            known = logprobs[at : (at := at + end - start)]
        spans.append(Span(start, end, chunk, version, advantage, temperature, known))
    cuts = accumulate(tensors[_COUNTS].tolist(), initial=0)
    return [spans[first:last] for first, last in pairwise(cuts)]


def _read_experts(
    tensors: Mapping[str, NDArray[Any]], lengths: NDArray[np.int32], routed: Sequence[bool]
) -> list[RoutedExperts | None]:
    """The recorded experts of each sample; None for a sample without recorded experts."""
    if not any(routed):
        return [None] * len(routed)
    own = lengths[np.array(routed)]
    found = zip(_split(tensors[_EXPERTS], own), _split(tensors[_KNOWN], own), strict=True)
    return [
        RoutedExperts(**dict(zip(("experts", "known"), next(found), strict=True))) if has else None for has in routed
    ]


def _read_kept(
    tensors: Mapping[str, NDArray[Any]], lengths: NDArray[np.int32], has: Sequence[bool]
) -> list[KeptSets | None]:
    """The kept sets of each sample; None for a sample without kept sets."""
    if not any(has):
        return [None] * len(has)
    counts = _split(tensors[_KEPT_COUNTS], lengths[np.array(has)])
    ids = _split(tensors[_KEPT_IDS], np.array([each.sum() for each in counts]))
    found = map(KeptSets.of_counts, ids, counts)
    return [next(found) if each else None for each in has]


def _split(array: NDArray[Any], lengths: NDArray[np.int32]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(array):
        raise ValueError(f"{len(array)} entries, expected {ends[-1] if ends else 0}")
    return [array[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)]
