"""A typed function as a tool: its schema, what it accepts, and where it runs."""

import asyncio
import datetime
import enum
import threading
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from verbatim.core.errors import ComponentError
from verbatim.environments.tools import FunctionTool, Tool, ToolArgumentsError, ToolResult


class Place(BaseModel):
    title: str
    km: float = 0.0


def look(
    place: Annotated[str, Field(description="A town.")],
    days: int = 1,
    unit: Literal["C", "F"] = "C",
) -> str:
    """Look at the sky
    over a town.

    More on it.
    """
    return f"{place} {days} {unit}"


async def test_the_signature_is_the_schema_and_the_docstring_the_description():
    tool = FunctionTool(look)
    assert isinstance(tool, Tool)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at the sky\nover a town.\n\nMore on it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"description": "A town.", "type": "string"},
                    "days": {"default": 1, "type": "integer"},
                    "unit": {"default": "C", "enum": ["C", "F"], "type": "string"},
                },
                "required": ["place"],
            },
        },
    }


async def test_defaults_and_given_arguments_reach_the_function():
    assert await FunctionTool(look)({"place": "Bonn"}) == ToolResult(content="Bonn 1 C")
    assert await FunctionTool(look)({"place": "Bonn", "days": 2, "unit": "F"}) == ToolResult(content="Bonn 2 F")


@pytest.mark.parametrize("value", ["", 'é\u2028"\\\x00', "\U0001f600", 2**80, -1, True, None, 0.1, [1, {"a": None}]])
def test_plain_arguments_arrive_as_they_were_given(value):
    def keep(value: str | int | bool | float | list | None) -> None:
        got.append(value)

    got = []
    FunctionTool(keep, inline=True).at_once({"value": value})
    assert got == [value]
    assert type(got[0]) is type(value)


def test_half_a_surrogate_pair_as_an_argument_is_refused():
    with pytest.raises(ToolArgumentsError, match="invalid JSON"):
        FunctionTool(look, inline=True).at_once({"place": "\ud800"})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "place: missing"),
        ({"place": 7}, "place: input should be a valid string, found 7"),
        ({"place": "a", "days": "2"}, 'days: input should be a valid integer, found "2"'),
        ({"place": "a", "days": 2.5}, "days: input should be a valid integer"),
        ({"place": "a", "days": True}, "days: input should be a valid integer, found true"),
        ({"place": "a", "unit": "K"}, "unit: input should be 'C' or 'F', found \"K\""),
        ({"plcae": "a"}, 'unknown argument plcae; expected place, days, unit; did you mean "place"?'),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_with_what_to_do(arguments, reason):
    with pytest.raises(ToolArgumentsError) as caught:
        await FunctionTool(look)(arguments)
    assert reason in str(caught.value)


async def test_json_forms_of_richer_types_are_read():
    def plan(day: datetime.date, places: list[Place], copy: tuple[int, int], title: str | None = None) -> str:
        return f"{day.year} {places[0].title} {places[0].km} {copy} {title}"

    tool = FunctionTool(plan)
    answer = await tool({"day": "2024-02-03", "places": [{"title": "Bonn", "km": 3}], "copy": [1, 2]})
    assert answer.content == "2024 Bonn 3.0 (1, 2) None"
    place = tool.schema["function"]["parameters"]["$defs"]["Place"]
    assert list(place["properties"]) == ["title", "km"]  # a property called title stays, made-up titles go
    assert "title" not in place


async def test_a_bound_method_acts_on_its_object_and_its_self_is_no_parameter():
    class Counter:
        count = 0

        def add(self, number: int) -> int:
            self.count += number
            return self.count

    counter = Counter()
    tool = FunctionTool(counter.add, name="plus", inline=True)
    assert tool.schema["function"] == {
        "name": "plus",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    }
    assert (await tool({"number": 2})).content == "2"
    assert (await tool({"number": 3})).content == "5"


async def test_what_is_not_text_is_answered_as_json():
    for value, text in (({"a": "é"}, '{"a": "é"}'), (None, ""), ([1], "[1]"), (True, "true")):
        assert (await FunctionTool(lambda_of(value))({})).content == text
    done = ToolResult(content="end", done=True, reward=0.5)
    assert await FunctionTool(lambda_of(done))({}) is done


def lambda_of(value):
    def tool():
        return value

    return tool


async def test_a_blocking_function_runs_off_the_loop_and_an_inline_one_on_it():
    def where() -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    assert (await FunctionTool(where)({})).content == "verbatim-tool"
    assert (await FunctionTool(where, inline=True)({})).content == here


async def test_an_async_function_runs_on_the_loop():
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert (await FunctionTool(where)({})).content == threading.current_thread().name


async def test_what_a_thread_raises_is_raised_here():
    def fails() -> str:
        raise KeyError("gone")

    def stops() -> str:
        raise StopIteration

    with pytest.raises(KeyError, match="gone"):
        await FunctionTool(fails)({})
    with pytest.raises(RuntimeError, match="StopIteration"):
        await FunctionTool(stops)({})


def test_functions_without_a_usable_signature_are_refused():
    def untyped(place):
        """No type."""

    def many(*places: str):
        """Many."""

    def odd(place: threading.Lock):
        """No JSON form."""

    refused = ((untyped, "place has no type"), (many, r"\*places: str stands for any number"), (odd, "no JSON form"))
    for function, reason in refused:
        with pytest.raises(ComponentError, match=reason):
            FunctionTool(function)


class Opaque(enum.Enum):
    A = object()


def opaque(x: Opaque) -> str: ...
def empty(x: Literal[()]) -> str: ...


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (opaque, "tool opaque: a parameter's type has no JSON form"),
        (empty, "tool empty: a parameter's type has no JSON form"),
        ("lost", r"FunctionTool\('lost'\): a str cannot be called; give the function itself, without parentheses"),
        (None, "a NoneType cannot be called"),
        (Opaque, r"FunctionTool\(Opaque\): a class is not a tool"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_what_to_give(given, says):
    with pytest.raises(ComponentError, match=says):
        FunctionTool(given)
