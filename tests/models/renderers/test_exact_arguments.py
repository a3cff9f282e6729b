"""A tool is given what was sampled, to the letter, or the call is none: for every format that writes arguments without
quotes. Each text is written by hand."""

import doctest

import numpy as np
import pytest
from families import FAMILIES, MORE
from random_calls import written
from test_read_calls import renderer_of

from verbatim.models.renderers import bare_values, marked_calls, raw_texts

EDIT = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {"old": {"type": "string"}, "new": {"type": "string"}, "times": {"type": "integer"}},
            },
        },
    }
]

QWEN = ("<tool_call>\n<function=edit>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n")
GLM = ("<tool_call>edit\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="edit">\n{}</invoke>\n</minimax:tool_call>',
    '<parameter name="{}">{}</parameter>\n',
)
FORMATS = {
    **{f"family {name}": QWEN for name in {**FAMILIES, **MORE} if name.startswith(("qwen3.", "nemotron"))},
    "family glm-4.5": GLM,
    "family glm-5": GLM,
    "family minimax-m2": MINIMAX,
    "template qwen3_5_think": QWEN,
    "template nemotron_3_nano": QWEN,
    "template glm4moe": GLM,
}


def text_of(name, arguments):
    call, argument = FORMATS[name]
    return call.format("".join(argument.format(key, value) for key, value in arguments))


def read(name, text, tools=EDIT):
    renderer = renderer_of(name)
    control = renderer.tokenizer.control_tokens
    assert any(token in text for token in control)
    ids = renderer.tokenizer.unescaped.encode(text, add_special_tokens=False)
    return renderer.parse_response(np.asarray(ids, dtype=np.int32), None, tools).tool_calls


def read_one(name, arguments):
    (call,) = read(name, text_of(name, arguments))
    return call.status, call.arguments


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_of_a_value_stays(name):
    code = "    if x:\n        return 1\n"
    assert read_one(name, [("old", code), ("new", ""), ("times", " 2 ")]) == (
        "ok",
        {"old": code, "new": "", "times": 2},
    )
    assert read_one(name, [("old", "\n\n\tx\n\n"), ("new", " ")]) == ("ok", {"old": "\n\n\tx\n\n", "new": " "})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "value",
    [
        "a </parameter> b",
        "</function>",
        "x</invoke>\ny",
        "</parameter>\n</function>\nz",
        "<parameter=other>",
        "</arg",
        "5",
        '{"a": 1}',
        "None",
    ],
)
def test_what_looks_like_a_tag_is_a_part_of_the_value(name, value):
    assert read_one(name, [("old", value), ("times", "2")]) == ("ok", {"old": value, "times": 2})


END_OF_A_CALL = {
    QWEN: "</parameter>\n</function>\n</tool_call>",
    GLM: "</arg_value>\n</tool_call>",
    MINIMAX: "</parameter>\n</invoke>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_whole_end_of_a_call_is_a_part_of_a_value_that_goes_on(name):
    value = f"x\n{END_OF_A_CALL[FORMATS[name]]}\ny"
    assert read_one(name, [("times", "2"), ("old", value)]) == ("ok", {"times": 2, "old": value})


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name] is QWEN])
@pytest.mark.parametrize(
    "body",
    [
        "old = ZZZ\n",
        '{"old": "x"}\n',
        "<parameter=old: ZZZ\n",
        "<parameter=old>\nx\n",
        "<parameter=old\nx\n</parameter>\n",
        "<parameter=old>\nx\n</parameter>\nand more\n",
        "hm <parameter=old>\nx\n</parameter>\n",
        "<parameter=old>\nx\n<parameter=new>\ny\n</parameter>\n",
        "<parameter=>\nx\n</parameter>\n",
        "<parameter=old>\nx\n</parameter>\n<parameter=old>\ny\n</parameter>\n",
        "<parameter=old>\nx\n</parameter>\n</function>\n<function=edit>\n<parameter=new>\ny\n</parameter>\n",
        "<parameter=old>\nx\n</parameter>\n<parameter=else>\ny\n</parameter>\n",
    ],
)
def test_a_call_that_is_more_or_less_than_its_parts_is_none(name, body):
    text = QWEN[0].format(body)
    (call,) = read(name, text)
    assert (call.status, call.name, call.arguments) == ("malformed_structure", None, None)
    assert call.raw == body.strip() or call.raw == f"edit>\n{body.strip()}"


@pytest.mark.parametrize("name", ["family glm-4.5", "family glm-5", "template glm4moe"])
@pytest.mark.parametrize(
    "body",
    [
        "<arg_key>old</arg_key>\n<arg_value>x\n",
        "<arg_key>old\n<arg_value>x</arg_value>\n",
        "<arg_value>x</arg_value>\n",
        "old = x\n",
        "<arg_key>old</arg_key>\n<arg_value>x</arg_value>\nmore\n",
        "<arg_key>old</arg_key>\n<arg_value>x</arg_value>\n<arg_key>old</arg_key>\n<arg_value>y</arg_value>\n",
    ],
)
def test_a_call_of_glm_that_is_more_or_less_than_its_parts_is_none(name, body):
    (call,) = read(name, GLM[0].format(body))
    assert (call.status, call.arguments) == ("malformed_structure", None)


@pytest.mark.parametrize("name", ["family minimax-m2"])
@pytest.mark.parametrize(
    "body",
    [
        '<parameter name="old">x\n',
        "<parameter name=old>x</parameter>\n",
        "old: x\n",
        '<parameter name="old">x</parameter> y\n',
    ],
)
def test_a_call_of_minimax_that_is_more_or_less_than_its_parts_is_none(name, body):
    (call,) = read(name, MINIMAX[0].format(body))
    assert (call.status, call.arguments) == ("malformed_structure", None)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name] is QWEN])
def test_a_newline_that_the_model_leaves_out_is_no_part_of_the_value(name):
    text = QWEN[0].format("<parameter=old>x</parameter><parameter=times>2</parameter>")
    (call,) = read(name, text)
    assert (call.status, call.arguments) == ("ok", {"old": "x", "times": 2})


JSON = {
    "family qwen3": "<tool_call>\n{}\n</tool_call>",
    "template qwen2_5": "<tool_call>\n{}\n</tool_call>",
    "family qwen3-vl": "<tool_call>\n{}\n</tool_call>",
}


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "edit", "arguments": {"old": "x", "old": "y"}}', "invalid_json"),
        ('{"name": "edit", "name": "look", "arguments": {}}', "invalid_json"),
        ('{"name": "edit", "parameters": {"old": "x"}}', "malformed_structure"),
        ('{"name": "edit", "arguments": {}, "parameters": {"old": "x"}}', "malformed_structure"),
        ('{"name": "edit", "arguments": null}', "malformed_structure"),
        ('{"name": "edit"}', "malformed_structure"),
        ('{"name": "edit", "arguments": "{}"}', "malformed_structure"),
        ('{"name": "edit", "arguments": {"old": {"a": 1, "a": 2}}}', "invalid_json"),
        ('{"name": "edit", "arguments": {"old": "x"}} and more', "invalid_json"),
        ('{"name": "edit", "arguments": {"times": 1e400}}', "invalid_json"),
        ('{"name": "edit", "arguments": {"times": [NaN]}}', "invalid_json"),
        ('{"name": "edit", "arguments": {"old": "x"}}{"name": "edit", "arguments": {}}', "invalid_json"),
    ],
)
def test_a_call_in_json_that_says_more_than_is_read_is_none(name, body, status):
    (call,) = read(name, JSON[name].format(body))
    assert (call.status, call.arguments) == (status, None)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (' to=functions.edit<|channel|>commentary json<|message|>{"old": " x\\n"}<|call|>', "ok"),
        ('<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"old": " x\\n"}<|call|>', "ok"),
        (
            '<|channel|>commentary to=functions.edit to=functions.look json<|message|>{"old": "x"}<|call|>',
            "malformed_structure",
        ),
        ('<|channel|>commentary to=functions.edit {"old": "z"}<|message|>{"old": "x"}<|call|>', "malformed_structure"),
        ('<|channel|>commentary to=functions.edit json<|message|>{"old": "x", "old": "y"}<|call|>', "invalid_json"),
        ('<|channel|>commentary to=functions.edit json<|message|>{"old": "x"}', "unclosed_block"),
    ],
)
def test_a_call_of_harmony(message, status):
    (call,) = read("family gpt-oss", message)
    assert (call.status, call.arguments) == (status, {"old": " x\n"} if status == "ok" else None)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ('call:edit{old:<|"|> x<|"|>}', "ok"),
        ('call:edit{old:<|"|>x<|"|>,old:<|"|> x<|"|>}', "malformed_structure"),
        ("call:edit{old: x}", "malformed_structure"),
        ("call:edit{times:02}", "malformed_structure"),
        ("call:edit{times:2 hm}", "malformed_structure"),
        ('call: edit{old:<|"|> x<|"|>}', "malformed_structure"),
        ('call:edit{old:<|"|> x<|"|>} hm', "malformed_structure"),
        ('call:edit{old:<|"|> x<|"|>', "malformed_structure"),
        ('call:edit{old:<|"|> x}', "malformed_structure"),
        ('call:edit{old:<|"|> x<|"|>,}', "malformed_structure"),
        ('call:edit{:<|"|> x<|"|>}', "malformed_structure"),
        ('call:edit{old :<|"|> x<|"|>}', "malformed_structure"),
        ("call:edit{old:[1}", "malformed_structure"),
        ("call:edit{old:" + "[" * 100 + "]" * 100 + "}", "malformed_structure"),
        ("call:edit", "malformed_structure"),
        ('call:{old:<|"|> x<|"|>}', "missing_name"),
        ("call:edit{times:1e400}", "invalid_json"),
    ],
)
def test_a_call_of_gemma_4_counts_only_as_the_family_writes_it(call, status):
    """The package's parser reads most of these as calls."""
    (read_call,) = read("family gemma4", f"<|tool_call>{call}<tool_call|>")
    assert (read_call.status, read_call.arguments) == (status, {"old": " x"} if status == "ok" else None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"old": '<|"|>', "new": "x"},
        {"old": 'x<|"|>,new:<|"|>y'},  # two arguments, for a reader of texts
        {"new": "<tool_call|>", "old": "<|tool_call>call:edit{"},
        {"times": -0.5, "deep": {"a b": [None, True, {}, []], 'a"b': {"c": 10**30}}},
        {},
    ],
)
def test_a_text_of_gemma_4_may_hold_what_looks_like_its_marks(arguments):
    call = {"id": "", "type": "function", "function": {"name": "edit", "arguments": arguments}}
    renderer = renderer_of("family gemma4")
    prompt, ids = written(renderer, [call])
    (found,) = renderer.parse_response(ids, prompt, EDIT).tool_calls
    assert (found.status, found.name, found.arguments) == ("ok", "edit", arguments)


def test_the_arguments_of_gemma_4_may_come_in_any_order():
    (call,) = read("family gemma4", '<|tool_call>call:edit{times:2,old:<|"|>x<|"|>,deep:{b:1,a:[]}}<tool_call|>')
    assert (call.status, call.arguments) == ("ok", {"times": 2, "old": "x", "deep": {"b": 1, "a": []}})


LFM = "template lfm2_2_5"


@pytest.mark.parametrize("name", [LFM, "template lfm2_2_5_v2"])
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("edit(old='it's', times=2)", {"old": "it's", "times": 2}),
        ("edit(old='if x:\n    return 1\n')", {"old": "if x:\n    return 1\n"}),
        (r"edit(old='C:\new\u0041', new='\')", {"old": r"C:\new\u0041", "new": "\\"}),
        ("edit(old='', new='''')", {"old": "", "new": "''"}),
        ("edit(old='a', 'b', new='f(x)', times=2)", {"old": "a', 'b", "new": "f(x)", "times": 2}),
        ("edit(old='x')]', times=2)", {"old": "x')]", "times": 2}),
        ("edit(old='#', new='\"')", {"old": "#", "new": '"'}),
        ("edit(old='x, new=1')", {"old": "x, new=1"}),  # Python reads it so too
        ('edit(old="x", times=2)', {"old": "x", "times": 2}),
        (r"""edit(far=['it\'s', "it's\n", {'a': None}])""", {"far": ["it's", "it's\n", {"a": None}]}),
        (r"""edit(far={"a": "\"\n", "b": [true]})""", {"far": {"a": '"\n', "b": [True]}}),
        ("edit()", {}),
    ],
)
def test_a_text_of_lfm_2_5_is_what_stands_between_its_quotes(name, call, arguments):
    (found,) = read(name, f"<|tool_call_start|>[{call}]<|tool_call_end|>")
    assert (found.status, found.name, found.arguments) == ("ok", "edit", arguments)


@pytest.mark.parametrize(
    ("calls", "status"),
    [
        ("edit(old='it's, new='x')", "invalid_json"),  # the first text has no end, or is all of it
        ("edit(old='it's)", "invalid_json"),
        ("edit(old='it's',new='x')", "invalid_json"),
        (r'edit(old="C:\new")', "malformed_structure"),
        (r"edit(old = 'C:\new')", "malformed_structure"),
        ("edit(old='x', old='it's')", "malformed_structure"),
        ("edit('it's')", "invalid_json"),
    ],
)
def test_a_call_of_lfm_2_5_that_may_be_another_is_none(calls, status):
    (found,) = read(LFM, f"<|tool_call_start|>[{calls}]<|tool_call_end|>")
    assert (found.status, found.arguments, found.raw) == (status, None, f"[{calls}]")


def test_two_calls_of_lfm_2_5_are_two():
    calls = read(LFM, "<|tool_call_start|>[edit(old='it's'), edit(new='a\nb', times=2)]<|tool_call_end|>")
    assert [call.arguments for call in calls] == [{"old": "it's"}, {"new": "a\nb", "times": 2}]


def test_what_the_readers_say_of_themselves():
    assert [doctest.testmod(module).failed for module in (bare_values, marked_calls, raw_texts)] == [0] * 3
