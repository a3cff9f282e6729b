"""The values and levels of JSON, counted without parsing it: as a reader of the parsed value counts them."""

from __future__ import annotations

import doctest
import inspect
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verbatim.core.errors import UsageError
from verbatim.inference.http import doors, json_size
from verbatim.inference.http.json_size import check_json_size

TEXTS = st.text(alphabet='a"\\[]{},:é', max_size=6)
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """Lists and objects, and the items behind their first; and the levels."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(0, len(value) - 1) + sum(n for n, _ in inner), 1 + max((depth for _, depth in inner), default=0)


@pytest.mark.parametrize("window", [1, 3, 64])
@settings(deadline=None, max_examples=150)
@given(value=JSON, ascii=st.booleans())
@example(value=["\\", '"', "[[", "\\\\", '\\"'], ascii=True)
def test_values_and_levels_are_those_of_the_parsed_value(window, value, ascii):
    data = json.dumps(value, ensure_ascii=ascii).encode()
    before, json_size.WINDOW = json_size.WINDOW, window
    try:
        assert json_size.json_size(data) == counted(value)
    finally:
        json_size.WINDOW = before


def test_too_many_values_and_levels_are_refused_and_text_is_neither():
    check_json_size(b'"' + b"[,{" * 200_000 + b'"', most_values=10)
    check_json_size(b"[" + b"1," * 9 + b"1]", most_values=10)
    with pytest.raises(UsageError, match="more than 9 values"):
        check_json_size(b"[" + b"1," * 9 + b"1]", most_values=9)
    with pytest.raises(UsageError, match="too deeply: 901 levels, at most 900"):
        check_json_size(b"[" * 901 + b"]" * 901)


def test_the_examples_are_true_and_a_pace_is_kept():
    assert doctest.testmod(json_size).failed == doctest.testmod(doors).failed == 0
    now = [0.0]
    even = doors.Pace(10, 1, now=lambda: now[0])
    waits = []
    for _ in range(50):
        waits.append(even.delay())
        now[0] += 0.2
    assert max(waits) < 1e-9, "what comes more slowly than that never waits"
    assert inspect.signature(doors.Pace).parameters["now"].default is time.monotonic
