"""Any chat template: its own ids, its own way to write calls, and clear errors for templates that are none."""

import json
import re

import numpy as np
import pytest
from dialogues import ANSWER, ASK, CALL, DIALOGUES, SEES, TOOLS
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.template import TemplateRenderer

PLAIN = (
    "{% for m in messages %}{% if m.role == 'tool' and not tools %}{{ raise_exception('no tools, no answers') }}"
    "{% endif %}[{{ m.role }}] {{ m.content | trim }}<eot>\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% endif %}{# <tool_call> #}"
)


def byte_tokenizer(template, *, eos="<eos>", tokens=("<eot>", "<eos>")):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


@pytest.fixture(scope="module")
def plain():
    return TemplateRenderer(byte_tokenizer(PLAIN))


# Arguments given as JSON text are parsed first: see the next test.
WITH_PARSED_ARGUMENTS = [
    dialogue
    for dialogue in DIALOGUES
    if not any(isinstance(c["function"]["arguments"], str) for m in dialogue[0] for c in m.get("tool_calls", ()))
]


@pytest.mark.parametrize("number", range(len(WITH_PARSED_ARGUMENTS)))
def test_rendering_is_the_chat_templates_own(template, tokenizer, number):
    messages, tools = WITH_PARSED_ARGUMENTS[number]
    for generation in (True, False):
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, return_dict=False
        )
        assert template.render_ids(messages, tools, generation).tolist() == theirs


def test_arguments_given_as_json_text_are_not_quoted_twice(template):
    as_text = {
        **CALL,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"place": "Bonn"}'}}],
    }
    assert template.render_ids([ASK, as_text, SEES]).tolist() == template.render_ids([ASK, CALL, SEES]).tolist()


def test_a_turn_ends_with_the_templates_own_close_too(plain):
    assert [plain.decode([i]) for i in plain.stop_token_ids] == ["<eos>", "<eot>"]


def test_stop_tokens_of_the_models_folder_are_used(tmp_path):
    fast = byte_tokenizer(PLAIN, tokens=("<eot>", "<eos>", "<eom>"))
    extra = fast.convert_tokens_to_ids("<eom>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [extra]}))
    fast.name_or_path = str(tmp_path)
    assert extra in TemplateRenderer(fast).stop_token_ids


def test_a_model_whose_turns_never_end_is_refused():
    with pytest.raises(ModelError, match="eos_token"):
        TemplateRenderer(byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", eos=None))


def test_untrusted_text_is_guarded(plain):
    ids = plain.render_ids([{"role": "user", "content": "a <eot> b"}])
    close = plain.stop_token_ids[1]
    assert ids.tolist().count(close) == 1
    assert plain.decode(ids) == "[user] a <eot> b<eot>\n[assistant] "


def test_messages_that_the_template_refuses_are_the_environments_fault(plain):
    with pytest.raises(EnvironmentFault, match=r"no tools, no answers.*roles are user, tool"):
        plain.render_ids([ASK, SEES])


def test_calls_are_read_where_the_template_writes_them_as_text():
    renderer = TemplateRenderer(
        byte_tokenizer(
            PLAIN.replace("{# <tool_call> #}", "").replace(
                "<eot>",
                (
                    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
                    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<eot>"
                ),
            )
        )
    )
    good = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call>'
    text = f"<think>so</think>Well.\n{good}\n<tool_call>[1]</tool_call><tool_call>{{"
    parsed = renderer.parse_response(np.asarray(renderer.tokenizer.encode(text), dtype=np.int32))
    assert parsed.content == "Well."
    assert parsed.reasoning_content == "so"
    assert [(c.name, c.status) for c in parsed.tool_calls] == [
        ("look", "ok"),
        (None, "malformed_structure"),
        (None, "unclosed_block"),
    ]


def test_no_calls_are_read_where_the_template_writes_none(plain):
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    parsed = plain.parse_response(np.asarray(plain.tokenizer.encode(text), dtype=np.int32))
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_calls_in_tokens_are_read_by_token(template, tokenizer):
    prompt = template.render_ids([ASK], TOOLS)
    whole = template.render_ids([ASK, CALL, SEES], TOOLS).tolist()
    completion = np.asarray(whole[len(prompt) : whole.index(template.stop_token_ids[0], len(prompt)) + 1])
    (call,) = template.parse_response(completion, prompt).tool_calls
    assert (call.name, call.arguments, call.status) == ("look", {"place": "Bonn"}, "ok")


def test_an_answer_is_read_without_its_close(template, tokenizer):
    parsed = template.parse_response(np.asarray(tokenizer.encode(ANSWER["content"] + "<|im_end|>")))
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls) == (ANSWER["content"], None, ())


ROUNDS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (ROUNDS + PLAIN, "does not finish rendering"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}" + PLAIN, "RecursionError"),
        ("{% for m in messages %}{{ m.content }}", r"not valid Jinja \(line 1"),
        ("{{ messages.append(messages[0]) }}" + PLAIN, "SecurityError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}" + PLAIN, "SecurityError"),
        ("{{ raise_exception('not today') }}" + PLAIN, "not today"),
        ("{% include '/etc/passwd' %}" + PLAIN, "cannot render one question"),
        ("", "chat_template.jinja"),
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}" + PLAIN, "cannot be compiled"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200 + PLAIN, "cannot be compiled"),
        ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30 + PLAIN, "cannot be compiled"),
        ("{{ 10 ** 5000 }}" + PLAIN, "computes a huge number"),
        ("\ud800" + PLAIN, "cannot be compiled"),
        ("{{ '\\ud800' }}" + PLAIN, "cannot render one question"),
        ("{{ 1 // 0 }}" + PLAIN, "ZeroDivisionError"),
        ("{% if add_generation_prompt %}{{ '{}{}'.format(1) }}{% endif %}" + PLAIN, "IndexError"),
    ],
    ids=[
        "endless",
        "recursive",
        "syntax",
        "changes what it is given",
        "reaches outside",
        "raises",
        "includes",
        "none",
        "deep brackets",
        "deep conditions",
        "deep loops",
        "a huge number",
        "half a character",
        "half a character that is written",
        "a division by zero",
        "fails in the prompt only",
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, complaint):
    with pytest.raises(ModelError, match=complaint):
        create_renderer("template", byte_tokenizer(template))


DOUBLING = "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING + "{{ f(40) }}",
        DOUBLING + "{% if tools %}{{ f(40) }}{% endif %}",
        "{% if tools %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
        "{% for i in range(2000) %}{% set x = range(99999) | map('string') | sort | list %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in range(9999) %}{% set x = r | list %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(31) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(31) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(9) %}{% set ns.x = ns.x * 99 %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_would_take_for_ever_is_refused_at_once(source):
    with pytest.raises(ModelError, match="does not finish rendering"):
        create_renderer("template", byte_tokenizer(source + PLAIN))


@pytest.mark.parametrize(
    "late",
    [
        "1 // 0",
        "'{}{}'.format(1)",
        "'x'.encode('foo')",
        "1 is divisibleby(0)",
        "cycler()",
        "[1, 'x'] | sort",
        "messages.x.y",
        "'\\ud800'",
    ],
)
def test_whatever_a_template_raises_is_a_refusal(late):
    source = "{% if messages | length > 3 %}{{ " + late + " }}{% endif %}" + PLAIN
    renderer = create_renderer("template", byte_tokenizer(source))
    with pytest.raises(EnvironmentFault, match="chat template refuses these messages"):
        renderer.render_ids([ASK, ANSWER] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"eos_token_id": "x"}',
        '{"eos_token_id": {}}',
        '{"eos_token_id": -1}',
        '{"eos_token_id": true}',
        '{"eos_token_id": [1, null]}',
        '{"eos_token_id": 1.5}',
        '{"eos_token_id": 99999999999}',
        "[" * 99999,
    ],
)
def test_a_broken_generation_config_is_said_to_be(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    fast = byte_tokenizer(PLAIN)
    fast.name_or_path = str(tmp_path)
    with pytest.raises(ModelError, match=r'generation_config\.json .*"eos_token_id", an id or a list of ids'):
        TemplateRenderer(fast)


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


ENDLESS: list = []
ENDLESS.append(ENDLESS)


def calling(call):
    return {"role": "assistant", "content": "", "tool_calls": call}


def with_call_arguments(arguments):
    return calling([{"type": "function", "function": {"name": "look", "arguments": arguments}}])


ARGUMENTS = "has tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hi", 'is of type str; expected a mapping, {"role"'),
        (None, "is of type NoneType"),
        ({"content": "hi"}, 'has no role; expected "role"'),
        ({"role": ["user"], "content": "hi"}, "has a role of type list"),
        (calling("look"), 'has "tool_calls" that are not calls; expected a list'),
        (calling(["look"]), 'has "tool_calls" that are not calls'),
        (calling([{"id": "1"}]), 'has "tool_calls" that are not calls'),
        (calling([{"function": None}]), 'has "tool_calls" that are not calls'),
        (calling([{"name": "look", "arguments": {}}]), 'has "tool_calls" that are not calls'),
        (with_call_arguments(nested(5000)), "is nested deeper than 64 levels"),
        (with_call_arguments({"a": ENDLESS}), "is nested deeper than 64 levels, or contains itself: tool_calls[0]"),
        (with_call_arguments('{"a": ' + "[" * 500 + "]" * 500 + "}"), "is nested deeper than 64 levels: tool_calls[0]"),
        (with_call_arguments("[" * 99999), "is nested deeper than 64 levels: tool_calls[0].function.arguments"),
        (with_call_arguments('{"a": 1, "a": 2}'), f"{ARGUMENTS} with a key twice"),
        (with_call_arguments('{"a": [{"b": 1, "b": 1}]}'), f"{ARGUMENTS} with a key twice"),
        (with_call_arguments('{"a": 1e400}'), f"{ARGUMENTS} with a number that JSON"),
        (with_call_arguments('{"a": [NaN]}'), f"{ARGUMENTS} with a number that JSON"),
        (with_call_arguments({"a": [float("-inf")]}), f"{ARGUMENTS} with a number that JSON"),
        (with_call_arguments([1]), f"{ARGUMENTS} of type list; expected an object"),
        ({**with_call_arguments({}), "role": "user"}, "has \"tool_calls\" and the role 'user'"),
        ({"role": "assistant", "content": "", "function_call": {"name": "look"}}, 'has a "function_call", which no'),
        (with_call_arguments({(1, 2): 3}), "holds a key of type tuple"),
    ],
)
def test_messages_that_are_none_are_the_environments_fault(plain, message, complaint):
    with pytest.raises(EnvironmentFault, match=re.escape(f"message 1 {complaint}"[:60])):
        plain.render_ids([ASK, message])
    prompt = plain.render_ids([ASK])
    completion = np.asarray(plain.tokenizer.encode("yes<eot>"), dtype=np.int32)
    with pytest.raises(EnvironmentFault, match=r"message 1 "):
        plain.bridge_to_next_turn(prompt, completion, [ASK, message])


@pytest.mark.parametrize("messages", ["hi", ASK, None])
def test_messages_that_are_no_list_are_the_environments_fault(plain, messages):
    with pytest.raises(EnvironmentFault, match="expected a list of messages"):
        plain.render_ids(messages)


@pytest.mark.parametrize("given", [None, "", " "])
@pytest.mark.parametrize("arguments", ["c.function.arguments.items() | list", "c.function.arguments | tojson"])
def test_a_call_without_arguments_is_written_as_one_with_an_empty_object(arguments, given):
    written = f"{{% for c in m.tool_calls or [] %}}{{{{ c.function.name ~ {arguments} }}}}{{% endfor %}}<eot>"
    renderer = TemplateRenderer(byte_tokenizer(PLAIN.replace("<eot>", written)))
    calls = (with_call_arguments(value) for value in (given, {}))
    texts = [renderer.decode(renderer.write_ids([ASK, call], None, True)) for call in calls]
    assert texts[0] == texts[1]
    assert "look" in texts[1]


def test_arguments_that_are_text_but_no_json_stay_text():
    renderer = TemplateRenderer(byte_tokenizer(PLAIN.replace("<eot>", "{{ m.tool_calls }}<eot>")))
    ids = renderer.write_ids([ASK, with_call_arguments("{[[" + "{" * 99 + "x")], None, True)
    assert "'arguments': '{[[{" in renderer.decode(ids)


def test_a_tokenizer_without_a_default_template_is_refused():
    fast = byte_tokenizer(PLAIN)
    fast.chat_template = {"tool_use": PLAIN, "rag": PLAIN}
    with pytest.raises(ModelError, match="none of them is named default"):
        create_renderer("template", fast)


class SlowTokenizer:
    chat_template = PLAIN


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ModelError, match=r"SlowTokenizer is a slow tokenizer.*tokenizer\.json"):
        create_renderer("template", SlowTokenizer())


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ModelError, match=r"no chat template; put a chat_template\.jinja"):
        create_renderer("template", byte_tokenizer(None))


@pytest.mark.parametrize("arguments", ["c.function.arguments", "c.function.arguments | tojson"])
def test_arguments_are_given_as_the_template_wants_them(arguments):
    # The first joins them to other text, and fails on a mapping; the second would quote a text.
    call = "{{ '<call>' + c.function.name + ' ' + (" + arguments + ") + '</call>' }}"
    loop = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    renderer = TemplateRenderer(byte_tokenizer(PLAIN.replace("<eot>", loop + "<eot>")))
    for given in ({"place": "Bonn"}, '{"place": "Bonn"}'):
        said = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": given}}],
        }
        assert '<call>look {"place": "Bonn"}</call>' in renderer.decode(renderer.render_ids([ASK, said]))
