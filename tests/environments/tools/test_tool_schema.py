"""What a tool tells the model: what its function's author wrote, in the forms of transformers' get_json_schema."""

import dataclasses
import functools
import json
import sys
import typing
from datetime import date
from typing import Annotated, Literal, NotRequired, TypedDict

import pytest
from described_functions import FUNCTIONS, Unit, by_position, plain, with_defaults
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from pinned import needs
from verbatim.core.errors import ComponentError
from verbatim.environments.tools import FunctionTool, ToolArgumentsError, ToolManager


def as_text(schema):
    """As a prompt holds it: the order counts."""
    return json.dumps(schema, ensure_ascii=False, indent=1)


BY_NAME = {function.__qualname__: function for function in FUNCTIONS}
IN_TODAYS_FORM = ("unions", "containers", "choices", "long_words", "sections_after")
"""Functions for which older releases of transformers make a different schema, or raise an error."""
todays_form = needs(
    "Or small." in as_text(get_json_schema(BY_NAME["long_words"])), "transformers", "today's form of schemas"
)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, id=name, marks=[todays_form] if name in IN_TODAYS_FORM else [])
        for name, function in BY_NAME.items()
    ],
)
def test_the_schema_is_that_of_transformers(function):
    theirs = get_json_schema(function)
    assert as_text(FunctionTool(function, returns=True).schema) == as_text(theirs)
    theirs["function"].pop("return", None)
    assert as_text(FunctionTool(function).schema) == as_text(theirs)


async def test_parameters_without_a_keyword_are_given_by_position():
    tool = FunctionTool(by_position, returns=True)
    assert tool.schema == get_json_schema(by_position)  # in another order: Python keeps these hints behind the others
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["place", "days", "unit"]
    assert (await tool({"place": "Bonn", "days": 2, "unit": "C"})).content == "Bonn 2 C"


@todays_form
def test_defaults_are_told_beside_what_transformers_tells():
    ours = json.loads(as_text(FunctionTool(with_defaults).schema))
    defaults = {
        name: about.pop("default")
        for name, about in ours["function"]["parameters"]["properties"].items()
        if "default" in about
    }
    assert defaults == {"days": 1, "unit": "C", "note": None, "levels": [1, 2]}
    theirs = get_json_schema(with_defaults)
    del theirs["function"]["return"]
    assert as_text(ours) == as_text(theirs)


HINTS = st.recursive(
    st.sampled_from([int, float, str, bool, list, dict, tuple, Unit, Literal["a", 1], typing.Any]),
    lambda inner: st.one_of(
        st.builds(lambda a: list[a], inner),
        st.builds(lambda a: dict[str, a], inner),
        st.builds(lambda a: typing.Optional[a], inner),  # noqa: UP045
        st.builds(lambda a, b: typing.Union[a, b], inner, inner),  # noqa: UP007
        st.builds(lambda a, b: tuple[a, b], inner, inner),
    ),
    max_leaves=6,
)
WORD = st.sampled_from(["town", "a", "it:", "(in km)", "x.", "Bonn,", "'s", "[0, 1]", "https://a.b/c", "ä"])
LINES = st.lists(st.lists(WORD, min_size=1, max_size=4).map(" ".join), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(HINTS, LINES), max_size=3), LINES, st.booleans())
def test_any_function_has_the_schema_of_transformers(arguments, opening, blank):
    names = [f"p{n}" for n in range(len(arguments))]
    parts = ["\n".join(opening), ""]
    if arguments:
        parts.append("Args:")
        for name, (_, lines) in zip(names, arguments, strict=True):
            first, *others = lines
            parts += [f"    {name}: {first}", *([""] if blank else []), *(f"        {line}" for line in others)]
    namespace = {f"hint_{name}": hint for name, (hint, _) in zip(names, arguments, strict=True)}
    exec(f"def function({', '.join(f'{name}: hint_{name}' for name in names)}): pass", namespace)
    function = namespace["function"]
    function.__doc__ = "\n".join(parts)
    assert as_text(FunctionTool(function).schema) == as_text(get_json_schema(function))


def numpy_style(place: str, days: int = 1) -> str:
    """Look at the sky.

    Over a town.

    Parameters
    ----------
    place : str
        The town, or
        the village.
    days : int, optional
        How many days ahead.

    Returns
    -------
    str
        What there is.
    """


def sphinx_style(place: str, days: int = 1) -> str:
    """Look at the sky.

    Over a town.

    :param place: The town, or
        the village.
    :param int days: How many days ahead.
    :returns: What there is.
    :raises ValueError: no such town.
    """


def google_style(place: str, days: int = 1) -> str:
    """Look at the sky.

    Over a town.

    Arguments:
        place (str): The town, or
            the village.
        days (int, optional): How many days ahead.

    Returns:
        What there is.
    """


@pytest.mark.parametrize("function", [numpy_style, sphinx_style, google_style])
def test_three_styles_of_docstring_say_the_same(function):
    about = FunctionTool(function, returns=True).schema["function"]
    assert about == {
        "name": function.__name__,
        "description": "Look at the sky.\n\nOver a town.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "The town, or the village."},
                "days": {"type": "integer", "description": "How many days ahead.", "default": 1},
            },
            "required": ["place"],
        },
        "return": {"type": "string", "description": "What there is."},
    }


def test_fields_describe_and_bound_what_the_docstring_leaves_open():
    def look(
        place: Annotated[str, Field(description="A town.", min_length=2)],
        days: int = Field(1, description="Ahead.", ge=0),
        hour: Annotated[int, Field(description="Not told.")] = 3,
    ) -> str:
        """Look.

        Args:
            hour: Of the day.
            nothing: Not a parameter.
        """

    assert FunctionTool(look).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "place": {"type": "string", "minLength": 2, "description": "A town."},
            "days": {"type": "integer", "minimum": 0, "description": "Ahead.", "default": 1},
            "hour": {"type": "integer", "description": "Of the day.", "default": 3},
        },
        "required": ["place"],
    }


@pytest.mark.parametrize(
    "text",
    ["Look.\n\nArgs:\nplace: no indent", "Look.\n\n:param", "Look.\n\nArgs:\n", "Look.\n\nParameters\n-----", "", ":"],
)
def test_a_broken_docstring_is_a_description_at_most(text):
    def look(place: str) -> str: ...

    look.__doc__ = text
    about = FunctionTool(look).schema["function"]
    assert about["parameters"]["properties"] == {"place": {"type": "string"}}
    assert about.get("description", "").startswith(text[:5])


class Place(BaseModel):
    """Somewhere."""

    name: str = Field(description="Of the town.")
    km: float | None = None
    unit: Unit = Unit.CELSIUS


@dataclasses.dataclass
class Trip:
    place: Place
    days: list[int]


def test_nested_models_are_told_whole():
    def plan(trip: Trip, back: Place | None = None) -> str:
        """Plan.

        Args:
            trip: Where to.
            back: Where from.
        """

    parameters = FunctionTool(plan).schema["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {
            "trip": {"$ref": "#/$defs/Trip", "description": "Where to."},
            "back": {"$ref": "#/$defs/Place", "nullable": True, "description": "Where from.", "default": None},
        },
        "required": ["trip"],
        "$defs": {
            "Place": {
                "type": "object",
                "description": "Somewhere.",
                "properties": {
                    "name": {"type": "string", "description": "Of the town."},
                    "km": {"type": "number", "nullable": True, "default": None},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                },
                "required": ["name"],
            },
            "Trip": {
                "type": "object",
                "properties": {
                    "place": {"$ref": "#/$defs/Place"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["place", "days"],
            },
        },
    }


class Leaf(TypedDict):
    name: str
    note: NotRequired[str]


class Tree(TypedDict, total=False):
    """Leaves."""

    leaves: typing.Required[list[Leaf]]
    trees: "list[Tree]"
    unit: Annotated[Unit | None, Field(description="Of it all.")]


async def test_typed_dicts_of_the_standard_library_are_objects():
    def grow(tree: Tree, more: dict[str, Leaf] | None = None) -> str:
        return f"{tree} {more}"

    tool = FunctionTool(grow)
    assert tool.schema["function"]["parameters"]["$defs"] == {
        "Leaf": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "note": {"type": "string"}},
            "required": ["name"],
        },
        "Tree": {
            "type": "object",
            "description": "Leaves.",
            "properties": {
                "leaves": {"type": "array", "items": {"$ref": "#/$defs/Leaf"}},
                "trees": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
                "unit": {"type": "string", "enum": ["C", "F"], "nullable": True, "description": "Of it all."},
            },
            "required": ["leaves"],
        },
    }
    answer = await tool({"tree": {"leaves": [{"name": "oak"}], "trees": [{"leaves": []}], "unit": "F"}})
    grown = {"leaves": [{"name": "oak"}], "trees": [{"leaves": []}], "unit": Unit.FAHRENHEIT}
    assert answer.content == f"{grown} None"
    with pytest.raises(ToolArgumentsError, match=r"tree\.leaves\.0\.name: missing"):
        await tool({"tree": {"leaves": [{}]}})


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there it works")
def test_a_typed_dict_inside_a_dataclass_says_what_to_import():
    @dataclasses.dataclass
    class Holder:
        leaf: Leaf

    def grow(holder: Holder) -> str: ...

    grow.__annotations__["holder"] = Holder
    with pytest.raises(ComponentError, match="from typing_extensions import TypedDict"):
        FunctionTool(grow)


async def test_choices_written_into_the_docstring_are_enforced():
    def order(drink: str) -> str:
        """Order.

        Args:
            drink: What to drink (choices: ["tea", "coffee"])
        """
        return drink

    tool = FunctionTool(order)
    assert (await tool({"drink": "tea"})).content == "tea"
    with pytest.raises(ToolArgumentsError, match="drink: input should be 'tea' or 'coffee', found \"beer\""):
        await tool({"drink": "beer"})


async def test_what_a_partial_binds_is_hidden_from_the_model():
    def search(index: dict[str, str], query: str, *, limit: int = 3, unit: str = "C") -> str:
        """Search an index.

        Args:
            index: Of the house.
            query: What to look for.
            limit: Most answers.
            unit: Bound.
        """
        return f"{index[query]} {limit} {unit}"

    tool = FunctionTool(functools.partial(search, {"a": "found"}, unit="F"))
    assert tool.schema["function"] == {
        "name": "search",
        "description": "Search an index.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "limit": {"type": "integer", "description": "Most answers.", "default": 3},
            },
            "required": ["query"],
        },
    }
    assert (await tool({"query": "a"})).content == "found 3 F"
    manager = ToolManager([functools.partial(search, {"a": "found"}, unit="F")])
    assert list(manager) == ["search"]


class Counter:
    """Counts."""

    total = 0

    def __call__(self, number: int) -> int:
        self.total += number
        return self.total

    async def later(self, number: int, /, times: int) -> int:
        """Count later."""
        return self(number * times)


async def test_an_object_that_can_be_called_is_a_tool():
    counter = Counter()
    tool = FunctionTool(counter)
    assert tool.schema["function"] == {
        "name": "Counter",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    }
    assert (await tool({"number": 2})).content == "2"
    assert list(ToolManager([counter])) == ["Counter"]
    twice = FunctionTool(functools.partial(counter.later, times=2))
    assert twice.name == "later"
    assert (await twice({"number": 4})).content == "10"
    always = FunctionTool(functools.partial(counter, 5), name="five")
    assert always.schema["function"]["parameters"]["properties"] == {}
    assert (await always({})).content == "15"


async def test_a_wrapper_that_hands_a_coroutine_through_is_awaited():
    async def look(place: str) -> str:
        return place

    @functools.wraps(look)
    def wrapper(*args, **kwargs):
        return look(*args, **kwargs)

    assert (await FunctionTool(wrapper)({"place": "Bonn"})).content == "Bonn"
    assert (await FunctionTool(wrapper, inline=True)({"place": "Bonn"})).content == "Bonn"


def test_a_method_without_its_object_says_what_to_give():
    with pytest.raises(ComponentError, match=r"a method without its object; give .*thing\.__call__"):
        FunctionTool(Counter.__call__)


def test_keywords_of_any_number_are_refused():
    def many(place: str, **more: str) -> str: ...

    with pytest.raises(ComponentError, match=r"\*\*more: str stands for any number of arguments"):
        FunctionTool(many)


def test_a_builtin_without_a_signature_is_refused():
    with pytest.raises(ComponentError, match="type hints cannot be read"):
        FunctionTool(dict.update)


def test_a_value_without_a_json_form_is_left_out_of_the_return():
    def look() -> typing.Callable[[], int]:
        """Look."""

    def when() -> date:
        """Look."""

    assert "return" not in FunctionTool(look, returns=True).schema["function"]
    assert FunctionTool(when, returns=True).schema["function"]["return"] == {"type": "string", "format": "date"}
    assert "return" not in FunctionTool(plain).schema["function"]
