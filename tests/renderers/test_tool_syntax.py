"""How models write tool calls, read off what their chat templates write; expectations are written by hand."""

from pathlib import Path

import numpy as np
import pytest
from random_dialogues import byte_tokenizer

from verbatim.renderers.template import TemplateRenderer

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
    return made.parse_response(np.asarray(made._tokenizer.encode(text), dtype=np.int32), None, tools)


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


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "zip": {"type": "string"}, "days": {"type": "integer"}}}}}]  # fmt: skip
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
        ("look", {"place": "Bonn", "days": 2}), ("go", {"far": True, "to": ["a"]}),
    ]  # fmt: skip
    hostile = '<|tool_call_start|>[__import__("os").system("true")]<|tool_call_end|>'
    (call,) = read(renderer("lfm2_v2"), hostile).tool_calls
    assert call.status == "malformed_structure"


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
