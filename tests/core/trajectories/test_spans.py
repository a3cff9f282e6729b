"""What spans say of a sample's tokens is the same token by token, at all of them and at the trained ones alone."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn
from verbatim import TrainingSample
from verbatim.core.records import spans as module
from verbatim.core.records.spans import OUTSIDE, Span, expanded, of_trained, trained_places


def test_the_worked_examples_in_the_docstrings_hold():
    assert doctest.testmod(module) == (0, 6)


@st.composite
def samples(draw):
    """Spans in ascending order, some next to each other, and the length of a sample that they fit in."""
    spans, end = [], draw(st.integers(1, 3))
    for chunk in range(draw(st.integers(0, 5))):
        start = end + draw(st.integers(0, 3))
        end = start + draw(st.integers(1, 4))
        logprobs = [-0.25 * (place + 1) for place in range(start, end)] if draw(st.booleans()) else None
        spans.append(
            Span(
                start,
                end,
                chunk,
                draw(st.integers(-1, 9)),
                draw(st.sampled_from([0.0, -1.5, 0.5])),
                draw(st.sampled_from([0.0, 0.7, 1.0])),
                logprobs and np.float32(logprobs),
            )
        )
    return spans, end + draw(st.integers(0, 2))


@pytest.mark.parametrize("places", [[(0, 2)], [(1, 6)], [(1, 3), (2, 4)], [(3, 4), (1, 2)]])
def test_a_sample_is_not_made_of_spans_outside_of_it_or_over_each_other(places):
    spans = [Span(start, end, 0, 1, 0.5, 1.0, None) for start, end in places]
    with pytest.raises(AssertionError, match="spans"):
        TrainingSample.of_spans(np.arange(5, dtype=np.int32), spans)


@given(samples())
@drawn("arrays of spans", 50, 5000)
def test_arrays_of_spans_hold_token_by_token_what_the_spans_say(made):
    spans, length = made
    of_token = {place: span for span in spans for place in range(span.start, span.end)}
    assert trained_places(spans).tolist() == sorted(of_token) and trained_places(spans).dtype == np.int64
    for name, said in (
        ("loss_mask", lambda span, place: True),
        ("chunk_ids", lambda span, place: span.chunk),
        ("policy_versions", lambda span, place: span.version),
        ("advantages", lambda span, place: span.advantage),
        ("temperatures", lambda span, place: span.temperature),
        ("logprobs", lambda span, place: np.nan if span.logprobs is None else span.logprobs[place - span.start]),
    ):
        dtype, outside = OUTSIDE[name]
        whole = [said(of_token[place], place) if place in of_token else outside for place in range(length)]
        for found, expected in (
            (expanded(spans, name, length), whole),
            (of_trained(spans, name), [whole[place] for place in sorted(of_token)]),
        ):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, np.array(expected, dtype=dtype))
