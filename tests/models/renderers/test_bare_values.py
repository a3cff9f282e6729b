"""Which value a text without quotes is: one rule for every format that writes such texts. Each table is by hand."""

import json

import pytest
from random_calls import ASK, written
from test_exact_arguments import FORMATS, read, text_of
from test_read_calls import renderer_of

PYTHON_WORDS = ("qwen3.5", "nemotron", "qwen3_5")
"""Formats that write null and booleans in Python's words."""
STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
EITHER = {"type": ["string", "integer"]}
NUMBER = {"type": ["number", "string"]}
LARGE = "9" * 5000
BY_SCHEMA = [
    (STRING_OR_NULL, "null", None),
    (STRING_OR_NULL, "None", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "null", None),
    ({"$ref": "#/$defs/Maybe"}, "null", None),
    (STRING_OR_NULL, "NULL", "NULL"),
    (STRING_OR_NULL, " null", " null"),
    (STRING_OR_NULL, "nullable", "nullable"),
    (STRING_OR_NULL, "", ""),
    (STRING_OR_NULL, "5", "5"),
    (STRING_OR_NULL, "true", "true"),
    (STRING_OR_NULL, '"null"', '"null"'),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["integer", "null"]}, " NULL ", None),
    (EITHER, "5", 5),
    (EITHER, "-5", -5),
    (EITHER, "9007199254740993", 9007199254740993),
    (EITHER, "05", "05"),
    (EITHER, "5.0", "5.0"),
    (EITHER, "5 ", "5 "),
    (EITHER, "+5", "+5"),
    (EITHER, "null", "null"),
    (EITHER, "True", "True"),
    (EITHER, LARGE, LARGE),
    (NUMBER, "2.50", 2.5),
    (NUMBER, "1e3", 1000.0),
    (NUMBER, "0.1", 0.1),
    (NUMBER, "0.1234567890123456789012", "0.1234567890123456789012"),
    (NUMBER, "1e400", "1e400"),
    (NUMBER, "1e-9999999999999999999", "1e-9999999999999999999"),
    (NUMBER, "NaN", "NaN"),
    ({"type": "number"}, "0.1234567890123456789012", 0.12345678901234568),
    ({"type": ["boolean", "string"]}, "True", True),
    ({"type": ["boolean", "string"]}, "false", False),
    ({"type": ["boolean", "string"]}, "TRUE", "TRUE"),
    ({"type": ["boolean", "string"]}, "None", "None"),
    ({"type": ["array", "string"]}, "[1, null]", [1, None]),
    ({"type": ["array", "string"]}, "[1e400]", "[1e400]"),
    ({"type": ["array", "string"]}, "[0.1234567890123456789012]", "[0.1234567890123456789012]"),
    ({"type": ["array", "string"]}, '{"a": 1}', '{"a": 1}'),
    ({"type": ["object", "string"]}, '{"a":1}', {"a": 1}),
    ({"type": ["object", "string"]}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
    ({"enum": ["auto", 1, None]}, "1", 1),
    ({"enum": ["auto", 1, None]}, "null", None),
    ({"enum": ["true", None]}, "true", "true"),
    ({"const": None}, "None", None),
    ({"type": "string", "enum": ["null", "none"]}, "null", "null"),
    ({"type": "string"}, "None", "None"),
    ({"type": "integer"}, "None", None),
    ({"type": "integer"}, "True", True),
    ({}, "null", None),
    ({}, "true", True),
    ({}, "5", 5),
    ({}, "[1]", [1]),
    ({}, "05", "05"),
    ({}, "NaN", "NaN"),
    ({}, '"5"', '"5"'),
    ({}, "1e400", "1e400"),
]


def tools_of(schema):
    """A tool `edit` whose parameter `old` has this schema."""
    parameters = {"type": "object", "properties": {"old": schema}, "$defs": {"Maybe": STRING_OR_NULL}}
    return [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]


def read_as(name, schema, text):
    (call,) = read(name, text_of(name, [("old", text)]), tools_of(schema))
    return call.status, json.dumps(call.arguments)


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_is_the_value_that_its_schema_allows(name):
    found = [(schema, text, read_as(name, schema, text)) for schema, text, _ in BY_SCHEMA]
    assert found == [(schema, text, ("ok", json.dumps({"old": value}))) for schema, text, value in BY_SCHEMA]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "five"),
        ({"type": ["boolean", "null"]}, "perhaps"),
        ({"type": "number"}, "1e400"),
        ({"type": "number"}, "-Infinity"),
        ({"type": "array"}, "[1e400]"),
        ({"type": "object"}, '{"a": 1, "a": 2}'),
        ({"enum": [1, 2]}, "one"),
    ],
)
def test_a_text_that_is_no_value_of_the_schema_makes_the_call_invalid(name, schema, text):
    assert read_as(name, schema, text) == ("invalid_json", "null")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("None", None)])
def test_words_of_python_are_values_without_a_declared_type_where_the_format_writes_them(name, text, value):
    expected = value if any(part in name for part in PYTHON_WORDS) else text
    assert read_as(name, {}, text) == ("ok", json.dumps({"old": expected}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_that_was_read_is_written_as_a_text_that_reads_as_the_same(name):
    renderer, changed = renderer_of(name), []
    for schema, text, value in BY_SCHEMA:
        tools = tools_of(schema)
        function = {"name": "edit", "arguments": {"old": value}}
        prompt, ids = written(renderer, [{"id": "call00000", "type": "function", "function": function}])
        (call,) = renderer.parse_response(ids, prompt, tools).tool_calls
        if (call.status, json.dumps(call.arguments)) != ("ok", json.dumps({"old": value})):
            changed.append((schema, text, renderer.decode(ids), call))
    assert changed == []


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_two_values_that_are_written_alike_is_the_other_one(name):
    """So says the rule: a demonstration or a client's history may hold the text "null", which no format tells apart."""
    renderer = renderer_of(name)
    prompts = []
    for value in ("null", None):
        call = {"type": "function", "function": {"name": "edit", "arguments": {"old": value}}}
        said = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", **call}]}
        prompts.append(renderer.decode(renderer.write_ids([ASK, said], tools_of(STRING_OR_NULL), False)))
    expected = prompts[0].replace("\nnull\n", "\nNone\n") if any(p in name for p in PYTHON_WORDS) else prompts[0]
    assert prompts[1] == expected
