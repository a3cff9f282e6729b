"""Schemas that would take for ever to check: the call's arguments are refused in bounded time."""

import itertools
from types import SimpleNamespace

import pytest

from verbatim.core.errors import ComponentError
from verbatim.core.types import ToolCall
from verbatim.environments.tools import json_arguments
from verbatim.environments.tools.json_arguments import JsonArguments
from verbatim.environments.tools.manager import ToolManager
from verbatim.environments.tools.tool import ToolArgumentsError
from waiting import HANGS

SLOW = "^(a|aa)+$"
TEXT = "a" * 60 + "b"


def of(**properties):
    return {"type": "object", "properties": properties}


DOUBLING = {
    "type": "object",
    "allOf": [{"$ref": "#/$defs/d0"}],
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}},
}
NESTED = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string", "pattern": SLOW}

SCHEMAS = {
    "a pattern": (of(at={"type": "string", "pattern": SLOW}), {"at": TEXT}),
    "a pattern of names": ({"type": "object", "patternProperties": {SLOW: {}}}, {TEXT: 1}),
    "a pattern of other names": (
        {"type": "object", "patternProperties": {SLOW: {}}, "additionalProperties": False},
        {TEXT: 1},
    ),
    "a pattern for all names": ({"type": "object", "propertyNames": {"pattern": SLOW}}, {TEXT: 1}),
    "a pattern in a part that names its dialect": (of(at=NESTED), {"at": TEXT}),
    "many patterns": (of(at={"type": "array", "items": {"pattern": SLOW}}), {"at": [TEXT] * 50}),
    "references that double": (DOUBLING, {}),
    "references without end": ({"type": "object", "$ref": "#"}, {}),
    "a draft 7 pattern": (
        {"$schema": "http://json-schema.org/draft-07/schema#", **of(at={"pattern": SLOW})},
        {"at": TEXT},
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_that_cannot_be_checked_in_time_are_refused(name, monkeypatch):
    """Without a limit, each of them takes longer than there is time."""
    monkeypatch.setattr(json_arguments, "SECONDS", 0.05)
    schema, arguments = SCHEMAS[name]
    checked = JsonArguments(schema, "tool look")
    with pytest.raises(ToolArgumentsError, match="cannot be checked against the tool's schema"):
        checked.validate(arguments)


@pytest.mark.parametrize(("after", "is_refused"), [(0.5, False), (1.5, True)])
def test_the_limit_is_one_of_processor_time(after, is_refused, monkeypatch):
    """A machine that stands still refuses no call."""
    clock = itertools.chain([100.0], itertools.repeat(100.0 + after))
    monkeypatch.setattr(json_arguments, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    checked = JsonArguments(of(at={"type": "string"}), "tool look")
    if is_refused:
        with pytest.raises(ToolArgumentsError, match="this takes more than 1 s"):
            checked.validate({"at": "Bonn"})
    else:
        assert checked.validate({"at": "Bonn"}) == {"at": "Bonn"}


async def test_such_a_call_is_answered_and_counted(monkeypatch):
    tools = ToolManager([{"name": "look", "parameters": SCHEMAS["a pattern"][0], "function": lambda at: at}])
    limits = {"timeout": HANGS, "output_limit": None}
    monkeypatch.setattr(json_arguments, "SECONDS", 0.05)
    outcome = await tools.dispatch(ToolCall(name="look", arguments={"at": TEXT}, raw=""), **limits)
    assert outcome.error_kind == "invalid_arguments"
    monkeypatch.undo()
    outcome = await tools.dispatch(ToolCall(name="look", arguments={"at": "aaa"}, raw=""), **limits)
    assert (outcome.error_kind, outcome.message["content"]) == (None, "aaa")


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (of(at={"pattern": "^[a-z]+$"}), {"at": "bonn"}, {"at": "Bonn"}),
        (of(at={"pattern": "(?!x)^.*$"}), {"at": "bonn"}, {"at": "xbonn"}),
        ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}}, {"n1": 1, "x": "y"}, {"n1": "1"}),
        ({"type": "object", "patternProperties": {"^n": {}}, "additionalProperties": False}, {"n": 1}, {"m": 1}),
        ({**of(a={}), "additionalProperties": {"type": "integer"}}, {"a": "x", "b": 1}, {"b": "x"}),
        (of(at={"uniqueItems": True}), {"at": [1, True, "1", [1], {"a": 1}]}, {"at": [1, 2, 1.0]}),
        (of(at={"uniqueItems": True}), {"at": [[0], [False], {"a": 1}, {"a": 2}]}, {"at": [{"a": [1]}, {"a": [1]}]}),
        ({**of(a={"$ref": "#/$defs/n"}), "$defs": {"n": {"type": "integer"}}}, {"a": 1}, {"a": "1"}),
        (of(**{"$schema": {"type": "integer"}}), {"$schema": 1}, {"$schema": "1"}),
    ],
)
def test_what_a_schema_says_still_holds(schema, fits, does_not):
    checked = JsonArguments(schema, "tool look")
    assert checked.validate(fits) == fits
    with pytest.raises(ToolArgumentsError):
        checked.validate(does_not)


def test_only_some_of_many_errors_are_told():
    checked = JsonArguments(of(at={"type": "array", "items": {"type": "integer"}}), "tool look")
    with pytest.raises(ToolArgumentsError) as refused:
        checked.validate({"at": ["x"] * 10_000})
    assert str(refused.value).count("is not of type") == 20


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "object", "patternProperties": {"a": {}}, "unevaluatedProperties": False}, "patternProperties"),
        (of(at={"pattern": "a" * 20_000}), "the pattern 'aaa.* more than 10,000 characters"),
        (of(at={"pattern": "((a{100}){100}){100}"}), "the pattern"),
        ({"type": "object", "patternProperties": {"(x{99999999999})": {}}}, "the pattern"),
        (of(at={"enum": list(range(200_000))}), "more than 100,000 values"),
    ],
)
def test_a_schema_that_cannot_be_bounded_is_refused(schema, complaint):
    with pytest.raises(ComponentError, match=f"tool look: its parameters .*{complaint}"):
        JsonArguments(schema, "tool look")


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        (r"\d{4}-\d{2}", 7),
        ("[a-z]{2}-(a{10}){10}", 103),
        ("(ab){3,5}", 10),
        ("a{2,}", 2),
        ("[{]{3}", 3),
        (r"\({2}", 2),
        ("^(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3})$", 33),
        ("a{}", 3),
    ],
)
def test_the_size_of_a_pattern_with_its_repeats_written_out(pattern, size, monkeypatch):
    """Fifty of them, which are far longer than what is written."""
    schema = of(at={"type": "string", "pattern": f"({pattern}){{50}}"})
    monkeypatch.setattr(json_arguments, "MOST_CHARACTERS", 50 * size)
    JsonArguments(schema, "tool look")
    monkeypatch.setattr(json_arguments, "MOST_CHARACTERS", 50 * size - 1)
    with pytest.raises(ComponentError, match="with its repeats expanded"):
        JsonArguments(schema, "tool look")


def test_usual_patterns_are_taken():
    for pattern in (r"^[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63}){1,8}$", r"^\d{3}-\d{3}-\d{4}$", "^(?!x)[^/]{1,255}$"):
        JsonArguments(of(at={"type": "string", "pattern": pattern}), "tool look")
