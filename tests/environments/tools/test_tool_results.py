"""Whatever a tool returns is text that a model can read."""

import dataclasses
import datetime
import decimal
import enum
import pathlib
import threading
import uuid

import numpy as np
import pytest
from pydantic import BaseModel

from verbatim.environments.tools import FunctionTool, ToolResult
from verbatim.environments.tools.function_tool import as_result


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


class Word(enum.StrEnum):
    YES = "yes"


class Place(BaseModel):
    name: str
    color: Color = Color.RED


@dataclasses.dataclass
class Trip:
    places: list[Place]
    day: datetime.date
    seen: set[int] = dataclasses.field(default_factory=set)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Color.RED, "red"),
        (Color.BLUE, "2"),
        (Word.YES, "yes"),
        ({"b", "a", "ü"}, '["a", "b", "ü"]'),
        ({10, 9, -1}, "[-1, 9, 10]"),
        ({10, "a", 9}, '["a", 10, 9]'),
        (frozenset({(2, 1), (1, 2)}), "[[1, 2], [2, 1]]"),
        (Place(name="Bonn"), '{"name": "Bonn", "color": "red"}'),
        (
            Trip([Place(name="Ulm", color=Color.BLUE)], datetime.date(2024, 2, 3), {3, 1}),
            '{"places": [{"name": "Ulm", "color": 2}], "day": "2024-02-03", "seen": [1, 3]}',
        ),
        ({Color.RED: (1, None), (1, 2): b"x"}, '{"red": [1, null], "[1, 2]": "x"}'),
        ([Color.BLUE, Word.YES, True, 1.5], '[2, "yes", true, 1.5]'),
        ((np.int64(3), np.array([[1.5, 2.0]])), "[3, [[1.5, 2.0]]]"),
        (decimal.Decimal("1.10"), '"1.10"'),
        (pathlib.PurePosixPath("/a/b"), '"/a/b"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        ("as it is", "as it is"),
        (None, ""),
    ],
)
def test_a_value_becomes_text(value, text):
    content = as_result(value).content
    assert content == text
    assert type(content) is str


async def test_a_tool_may_return_any_of_them():
    def trip() -> Trip:
        return Trip([], datetime.date(2024, 2, 3))

    assert (await FunctionTool(trip)({})).content == '{"places": [], "day": "2024-02-03", "seen": []}'
    done = ToolResult(content="end", done=True)
    assert as_result(done) is done


def test_what_has_no_json_form_says_what_to_return():
    with pytest.raises(TypeError, match="a lock has no JSON form; return a string, a dict or a dataclass"):
        as_result({"a": threading.Lock()})


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b"},
        {True: "a", "true": "b"},
        {None: "a", "null": "b"},
        {datetime.date(2026, 1, 5): "a", "2026-01-05": "b"},
        [{pathlib.PurePosixPath("a"): 1, "a": 2}],
    ],
)
def test_keys_that_are_one_text_are_refused_and_none_is_lost(value):
    with pytest.raises(TypeError, match="two keys"):
        as_result(value)
