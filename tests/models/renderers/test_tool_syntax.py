"""How models write tool calls, read off what their chat templates write; expectations are written by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_dialogues import byte_tokenizer

from verbatim.models.renderers.template import TemplateRenderer

FOLDER = Path(__file__).parent / "data" / "trl_templates"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def renderer(name):
    text = MISTRAL if name == "mistral" else (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return TemplateRenderer(byte_tokenizer(text))


def read(made, text, tools=None):
    return made.parse_response(np.asarray(made.tokenizer.encode(text), dtype=np.int32), None, tools)


WRITTEN = {
    "qwen2_5": ("Hm.\n<tool_call>\n{call}\n</tool_call>", "arguments"),
    "qwen3": ("Hm.\n\n<tool_call>\n{call}\n</tool_call>", "arguments"),
    "llama3_1": ("{call}", "parameters"),
    "mistral": ("[TOOL_CALLS] [{call}]", "arguments"),
}
"""What models of these templates sample, by their publishers' documentation; the key of the arguments."""


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_are_one_json_object(name):
    written, key = WRITTEN[name]
    call = f'{{"name": "look", "{key}": {{"place": "K\u00f6ln", "days": 2}}}}'
    parsed = read(renderer(name), written.replace("{call}", call))
    assert [(c.name, c.arguments, c.status) for c in parsed.tool_calls] == [
        ("look", {"place": "K\u00f6ln", "days": 2}, "ok")
    ]
    assert parsed.content == ("Hm." if written.startswith("Hm.") else "")


def test_several_calls_in_a_list_are_each_read():
    text = '[TOOL_CALLS] [{"name": "look", "arguments": {}}, {"name": "go", "arguments": {"to": "Bonn"}}]'
    calls = read(renderer("mistral"), text).tool_calls
    assert [(c.name, c.arguments) for c in calls] == [("look", {}), ("go", {"to": "Bonn"})]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
TAGGED = {
    "qwen3_5_think": (
        "<tool_call>\n<function=look>\n<parameter=zip>\n00123\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm4moe": (
        "<tool_call>look\n<arg_key>zip</arg_key>\n<arg_value>00123</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("name", TAGGED)
def test_calls_in_tags_are_read_with_the_types_of_their_schema(name):
    (call,) = read(renderer(name), TAGGED[name], TOOLS).tool_calls
    assert (call.name, call.arguments, call.status) == ("look", {"zip": "00123", "days": 2}, "ok")


def test_calls_in_tags_without_a_schema_are_read_as_json_where_they_are_json():
    text = TAGGED["glm4moe"].replace("00123", '["a", 1]')
    (call,) = read(renderer("glm4moe"), text).tool_calls
    assert call.arguments == {"zip": ["a", 1], "days": 2}


def test_calls_written_as_python_are_read_and_never_run():
    text = '<|tool_call_start|>[look(place="Bonn", days=2), go(far=True, to=["a"])]<|tool_call_end|>Fine.'
    calls = read(renderer("lfm2_v2"), text).tool_calls
    assert [(c.name, c.arguments) for c in calls] == [
        ("look", {"place": "Bonn", "days": 2}),
        ("go", {"far": True, "to": ["a"]}),
    ]
    hostile = '<|tool_call_start|>[__import__("os").system("true")]<|tool_call_end|>'
    (call,) = read(renderer("lfm2_v2"), hostile).tool_calls
    assert call.status == "malformed_structure"


LOOK_AND_GO = (
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    ('<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'),
)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("qwen2_5", " So.\n{}\n and \n{}\n Done.\n".format(*LOOK_AND_GO), " So.\nand\nDone."),
        ("qwen2_5", "{}\n{}".format(*LOOK_AND_GO), ""),
        ("lfm2_v2", "<|tool_call_start|>[look()]<|tool_call_end|>I look.<|im_end|>", "I look."),
    ],
)
def test_the_text_between_and_behind_calls_is_content_too(name, text, content):
    """LFM says what it does behind the call that does it."""
    parsed = read(renderer(name), text)
    assert (parsed.content, {call.status for call in parsed.tool_calls}) == (content, {"ok"})


def test_what_is_behind_a_call_that_cannot_be_read_may_be_a_part_of_it():
    parsed = read(renderer("qwen2_5"), "So.\n<tool_call>\n{\n</tool_call>\n}\n</tool_call>")
    assert (parsed.content, [call.status for call in parsed.tool_calls]) == ("So.", ["invalid_json"])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<tool_call>\n{nonsense\n</tool_call>", "invalid_json"),
        ('<tool_call>\n{"name": "look", "arguments": {}}', "unclosed_block"),
        ("<tool_call>\n[1, 2]\n</tool_call>", "malformed_structure"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "missing_name"),
    ],
)
def test_what_is_no_call_keeps_its_text_and_says_why(text, status):
    (call,) = read(renderer("qwen2_5"), text).tool_calls
    assert call.status == status
    assert call.raw
    assert call.raw in text


def test_bare_json_is_a_call_only_where_it_is_the_whole_answer():
    made = renderer("llama3_1")
    for text in ('The answer: {"name": "look", "parameters": {}}', '{"place": "Bonn"}', "[1]", "{"):
        assert (read(made, text).content, read(made, text).tool_calls) == (text, ())


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 3}',
        '{"name": "look", "parameters": [1]}',
        '{"name": ["look"], "parameters": {}}',
        '{"name": "Bonn is nice',
        '{"name": "look", "arguments": {"at": 1}}',
    ],
)
def test_bare_json_without_a_name_and_arguments_is_an_answer(text):
    parsed = read(renderer("llama3_1"), text)
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_a_bare_call_that_is_cut_off_is_an_attempt():
    (call,) = read(renderer("llama3_1"), '{"name": "look", "parameters": {"at": ').tool_calls
    assert (call.name, call.status) == (None, "invalid_json")


@pytest.mark.parametrize(
    "value",
    [
        "{[1]}",
        "{{}}",
        "{1, 2}",
        'b"x"',
        "1j",
        "1 + 2",
        "...",
        "set()",
        "-x",
        "{1: 2}",
        "{[]: 2}",
        "{**{}}",
        '{"a": 1, "a": 2}',
        'f"{x}"',
        "0x10",
        "1_000",
        "-0b1",
        "1.",
    ],
)
def test_what_is_python_but_not_json_is_no_argument(value):
    text = f"<|tool_call_start|>[look(at={value})]<|tool_call_end|>"
    (call,) = read(renderer("lfm2_v2"), text).tool_calls
    assert (call.name, call.arguments, call.status) == (None, None, "malformed_structure")


@pytest.mark.parametrize("keywords", ["**{'at': 1}", "at=1, at=2", "at=1, **{'at': 1}"])
def test_arguments_without_a_name_of_their_own_are_malformed(keywords):
    (call,) = read(renderer("lfm2_v2"), f"<|tool_call_start|>[look({keywords})]<|tool_call_end|>").tool_calls
    assert call.status == "malformed_structure"


def test_python_is_read_as_the_json_that_it_means():
    text = '<|tool_call_start|>[look(a=-1.5, b=None, c=null, d=(1, True), e={"f": [false]})]<|tool_call_end|>'
    (call,) = read(renderer("lfm2_v2"), text).tool_calls
    assert call.arguments == {"a": -1.5, "b": None, "c": None, "d": [1, True], "e": {"f": [False]}}


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 10**30])
def test_an_integer_in_python_is_exact(number):
    (call,) = python_calls_of(f"[look(at={number}, far=[{number}])]")
    assert call.arguments == {"at": number, "far": [number]}


def python_calls_of(text):
    return read(renderer("lfm2_v2"), f"<|tool_call_start|>{text}<|tool_call_end|>").tool_calls


@pytest.mark.parametrize("number", ["1e400", "-1e400", "[1e400]", '{"a": -1e400}'])
def test_a_number_in_python_never_becomes_infinite(number):
    (call,) = python_calls_of(f"[look(at={number})]")
    assert (call.arguments, call.status) == (None, "invalid_json")


def test_a_fraction_in_python_is_the_nearest_double():
    (call,) = python_calls_of("[look(at=0.1234567890123456789012)]")
    assert call.arguments == {"at": 0.12345678901234568}


@pytest.mark.parametrize("name", ["files.read", "get-weather", "a.b-c.d", "mcp__git__log", "看", "ｌook", "x/y"])
def test_the_name_of_a_call_in_python_is_the_text_before_its_bracket(name):
    (call,) = python_calls_of(f'[{name}(at="x", far=[1,\n2])]')
    assert (call.name, call.arguments, call.status) == (name, {"at": "x", "far": [1, 2]}, "ok")


@pytest.mark.parametrize("name", ["lfm2_v2", "lfm2_2_5"])
def test_words_of_python_are_names_of_tools_and_parameters(name):
    text = (
        "<|tool_call_start|>[import(from='Bonn', class=None, in={'is': [True, 'from=1']}, at='or(')]<|tool_call_end|>"
    )
    (call,) = read(renderer(name), text).tool_calls
    assert (call.name, call.status) == ("import", "ok")
    assert call.arguments == {"from": "Bonn", "class": None, "in": {"is": [True, "from=1"]}, "at": "or("}


@pytest.mark.parametrize(
    "call",
    [
        "look(at=not(1))",
        "look(at=1 == 2)",
        "look(at=lambda: 1)",
        "look(from=1, from=2)",
        "look(ａt=1)",
        "look(at=ｔrue)",
        "[look(at=1) # or so\n]",
        "[look(at=1)\n# go(to=2)\n]",
        "look(at=1)-go(to=2)",
        "look(at=1).go(to=2)",
        "2 * look(at=1)",
        "(look)(at=1)",
        "-look(at=1)",
        "look[0](at=1)",
    ],
)
def test_a_call_in_python_that_says_more_or_other_than_is_read_is_none(call):
    """Letters of full width would become plain ones, and a comment would be left out."""
    (read,) = python_calls_of(call if call.startswith("[") else f"[{call}]")
    assert (read.name, read.arguments, read.status) == (None, None, "malformed_structure")


def look(schema):
    defined = {"Code": {"type": "string"}, "Endless": {"allOf": [{"$ref": "#/$defs/Endless"}]}}
    parameters = {"type": "object", "properties": {"at": schema}, "$defs": defined}
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


@pytest.mark.parametrize("name", ["qwen3_5_think", "glm4moe"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"$ref": "#/$defs/Code"}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/Code"}]}, "null", "null"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "5"}, "5", "5"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"$ref": "#/$defs/Endless"}, "5", 5),
        ({"$ref": "#/$defs/Missing"}, "5", 5),
    ],
)
def test_a_bare_argument_has_a_type_that_its_schema_declares(name, schema, text, value):
    (call,) = read(renderer(name), argument(name, text), look(schema)).tool_calls
    assert (json.dumps(call.arguments), call.status) == (json.dumps({"at": value}), "ok")


def test_a_bare_argument_of_none_of_the_declared_types_is_invalid():
    (call,) = read(renderer("glm4moe"), argument("glm4moe", "two"), look({"type": "integer"})).tool_calls
    assert (call.name, call.arguments, call.status) == ("look", None, "invalid_json")


def argument(name, text):
    """A call of look with one argument."""
    _, _, rest = TAGGED[name].partition("00123")
    end = rest.rpartition("2")[2]
    return TAGGED[name].partition("00123")[0].replace("zip", "at") + text + end


@pytest.mark.parametrize(
    "tools",
    [
        "look",
        ["look"],
        [None],
        {"a": 1},
        [{"function": None}],
        [{"function": {"name": "look", "parameters": "x"}}],
        [{"function": {"name": "look", "parameters": {"properties": ["zip"]}}}],
        [{"function": {"name": "look", "parameters": {"properties": {"zip": "b", "days": {"type": {"a": 1}}}}}}],
        [{"function": {"name": "look", "parameters": {"properties": {"zip": {"anyOf": 3}, "days": {"type": [[]]}}}}}],
    ],
)
def test_a_malformed_schema_says_nothing_of_types(tools):
    (call,) = read(renderer("glm4moe"), TAGGED["glm4moe"].replace("00123", "Bonn"), tools).tool_calls
    assert (call.arguments, call.status) == ({"zip": "Bonn", "days": 2}, "ok")


PROSE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}I will call "
    "{{ c.function.name }} with {{ c.function.arguments | tojson }}.{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("text", ["I think so.", "I will see.", "API will call back."])
def test_prose_is_no_call_where_calls_begin_with_prose(text):
    parsed = read(TemplateRenderer(byte_tokenizer(PROSE)), text)
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_a_call_that_begins_with_prose_is_read():
    parsed = read(TemplateRenderer(byte_tokenizer(PROSE)), 'I see. I will call look with {"at": "x"}.')
    assert (parsed.content, [(c.name, c.arguments) for c in parsed.tool_calls]) == ("I see.", [("look", {"at": "x"})])


def test_what_only_looks_like_a_mark_is_text():
    made = renderer("qwen2_5")
    text = 'Write <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call> and <|im_end|>.'
    ids = made.tokenizer.encode(made.tokenizer.escaper.text(text))
    assert not set(ids).intersection(made.tokenizer.control_tokens.values())
    parsed = made.parse_response(np.asarray(ids, dtype=np.int32))
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_a_format_that_writes_values_otherwise_than_they_are_is_not_read():
    calls = "{% for c in m.tool_calls or [] %}<call><name>{{ c.function.name }}</name>"
    calls += "{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k><v>VALUE</v>{% endfor %}</call>"
    source = PROSE.replace("{% for c in m.tool_calls or [] %}I will call ", calls + "{% endfor %}{% for c in [] %}")
    text = "<call><name>look</name><k>at</k><v>a &lt; b</v></call>"
    plain, escaped = (
        TemplateRenderer(byte_tokenizer(source.replace("VALUE", f"{{{{ {value} }}}}"))) for value in ("v", "v | e")
    )
    assert [call.arguments for call in read(plain, text).tool_calls] == [{"at": "a &lt; b"}]
    assert (escaped.tool_support.read, read(escaped, text).content) == (False, text)


def test_a_format_without_an_end_of_values_is_not_read():
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    source = PROSE.replace(
        "{% for c in m.tool_calls or [] %}I will call ",
        calls + "<k>{{ k }}</k>{{ v }}{% endfor %}</call>{% endfor %}{% for c in [] %}",
    )
    text = "<call>look<k>at</k>Bonn</call>"
    assert read(TemplateRenderer(byte_tokenizer(source)), text).content == text


PIECES = [
    "<tool_call>", "</tool_call>", "<function=look>", "<parameter=at>", "</parameter>", "</function>", "look", "at",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "{",
    "}", "(", ")", '"', ":", ",", "=", "name", "arguments", "{[1]}", "None", "5", "\n", "<think>", "</think>", "**",
    "[TOOL_CALLS]", '{"name": "look", "arguments": {}}', "\ufdd5", "0x" + "f" * 4000,
]  # fmt: skip
SYNTAXES = ["qwen2_5", "llama3_1", "mistral", "qwen3_5_think", "glm4moe", "lfm2_v2"]


@settings(deadline=None)  # the first example of each makes its renderer
@given(st.sampled_from(SYNTAXES), st.lists(st.sampled_from(PIECES), max_size=20))
def test_whatever_is_sampled_is_read_and_its_arguments_are_json(name, pieces):
    if name not in made:
        made[name] = renderer(name)
    for call in read(made[name], "".join(pieces), look({"type": ["integer", "null"]})).tool_calls:
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        assert (call.arguments is not None) == (call.status == "ok")


made: dict[str, TemplateRenderer] = {}
