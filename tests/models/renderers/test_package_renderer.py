"""The qwen3 family: the ids of the chat template, exact bridges, and a parser that nothing makes raise."""

import json

import numpy as np
import pytest
from dialogues import ANSWER, ASK, CALL, DIALOGUES, SEES, THOUGHT, TOOLS
from families import family_renderer, family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import Renderer, package
from verbatim.models.renderers.nesting import MAX_DEPTH
from verbatim.models.renderers.package import PackageRenderer


def template_ids(tokenizer, messages, tools, generation=True):
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generation, return_dict=False)


def ids(values):
    return np.asarray(values, dtype=np.int32)


def sampled(tokenizer, text):
    return ids(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("number", range(len(DIALOGUES)))
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_is_the_chat_templates_own(qwen3, tokenizer, number, generation):
    messages, tools = DIALOGUES[number]
    ours = qwen3.render_ids(messages, tools, add_generation_prompt=generation)
    assert ours.dtype == np.int32
    assert ours.tolist() == template_ids(tokenizer, messages, tools, generation)


def test_it_is_a_renderer(qwen3, template):
    assert isinstance(qwen3, Renderer)
    assert isinstance(template, Renderer)


def test_a_turn_ends_with_the_close_of_the_turn_or_the_end_of_text(qwen3, tokenizer):
    assert qwen3.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


CALL_TEXT = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call><|im_end|>'


def test_a_bridge_to_a_tools_answer_is_the_full_render(qwen3, tokenizer):
    prompt = qwen3.render_ids([ASK], TOOLS)
    completion = sampled(tokenizer, CALL_TEXT)
    bridged = qwen3.bridge_to_next_turn(prompt, completion, [SEES], TOOLS)
    assert bridged.tolist() == qwen3.render_ids([ASK, CALL, SEES], TOOLS).tolist()
    assert bridged[: len(prompt) + len(completion)].tolist() == [*prompt, *completion]


def counting_bridges(tokenizer, monkeypatch):
    """A renderer, and the bridges that its family computes."""
    computed, create = [], package.create_family

    def counted(*given):
        family = create(*given)
        bridge = family.bridge_to_next_turn
        family.bridge_to_next_turn = lambda *turn, **how: computed.append(turn) or bridge(*turn, **how)
        return family

    monkeypatch.setattr(package, "create_family", counted)
    return PackageRenderer(tokenizer), computed


def test_a_bridge_that_comes_again_is_remembered_and_any_other_is_not(tokenizer, monkeypatch):
    renderer, computed = counting_bridges(tokenizer, monkeypatch)
    prompt, completion = renderer.render_ids([ASK], TOOLS), sampled(tokenizer, CALL_TEXT)
    first = renderer.bridge_to_next_turn(prompt, completion, [SEES], TOOLS)
    computed.clear()
    first[-1] = -1  # what the caller does with its array changes nothing
    again = renderer.bridge_to_next_turn(prompt.copy(), completion.copy(), [dict(SEES)], TOOLS)
    assert again.tolist() == renderer.render_ids([ASK, CALL, SEES], TOOLS).tolist()
    assert computed == []
    other = {**SEES, "content": "rain"}
    text = renderer.decode(renderer.bridge_to_next_turn(prompt, completion, [other], TOOLS))
    assert "rain" in text
    assert renderer.bridge_to_next_turn(prompt, completion[:-3], [SEES], TOOLS) is not None
    assert len(computed) == 2


def test_a_long_bridge_is_not_remembered(tokenizer, monkeypatch):
    renderer, computed = counting_bridges(tokenizer, monkeypatch)
    prompt, completion = renderer.render_ids([ASK], TOOLS), sampled(tokenizer, CALL_TEXT)
    renderer.bridge_to_next_turn(prompt, completion, [SEES], TOOLS)  # the first one tries the family too
    for answer, times in (("rain", 1), ("rain " * 400, 2)):
        computed.clear()
        for _ in range(2):
            renderer.bridge_to_next_turn(prompt, completion, [{**SEES, "content": answer}], TOOLS)
        assert len(computed) == times


def test_a_bridge_keeps_thinking_that_the_template_keeps_too(qwen3, tokenizer):
    thoughtful = {**CALL, "reasoning_content": "Bonn, then."}
    prompt = qwen3.render_ids([ASK], TOOLS)
    completion = sampled(tokenizer, "<think>\nBonn, then.\n</think>\n\n" + CALL_TEXT)
    bridged = qwen3.bridge_to_next_turn(prompt, completion, [SEES, SEES], TOOLS)
    assert bridged.tolist() == qwen3.render_ids([ASK, thoughtful, SEES, SEES], TOOLS).tolist()


def test_a_bridge_keeps_sampled_ids_that_text_would_not_give_back(qwen3, tokenizer):
    prompt = qwen3.render_ids([ASK], TOOLS)
    odd = [i for c in CALL_TEXT[:-10] for i in tokenizer.encode(c)] + [qwen3.stop_token_ids[0]]
    assert len(odd) > len(sampled(tokenizer, CALL_TEXT))
    bridged = qwen3.bridge_to_next_turn(prompt, ids(odd), [SEES], TOOLS)
    assert bridged[: len(prompt) + len(odd)].tolist() == [*prompt, *odd]


def test_a_user_turn_after_thinking_is_refused_because_the_template_drops_the_thinking(qwen3, tokenizer):
    prompt = qwen3.render_ids([ASK])
    completion = sampled(tokenizer, "<think>\nhm\n</think>\n\nIt is 20.<|im_end|>")
    assert qwen3.bridge_to_next_turn(prompt, completion, [ASK]) is None


def test_a_user_turn_after_earlier_thinking_is_refused_too(qwen3, tokenizer):
    prompt = qwen3.render_ids([ASK, {**CALL, "reasoning_content": "hm"}, SEES], TOOLS)
    assert qwen3.bridge_to_next_turn(prompt, sampled(tokenizer, "20.<|im_end|>"), [ASK], TOOLS) is None


def test_a_user_turn_where_nothing_was_thought_is_the_full_render(qwen3, tokenizer):
    prompt = qwen3.render_ids([ASK])
    completion = sampled(tokenizer, ANSWER["content"] + "<|im_end|>")
    bridged = qwen3.bridge_to_next_turn(prompt, completion, [ASK])
    assert bridged.tolist() == qwen3.render_ids([ASK, ANSWER, ASK]).tolist()


@given(
    completion=st.lists(st.integers(0, 520), max_size=12),
    new=st.lists(st.sampled_from(["user", "tool", "system"]), min_size=1, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_a_bridge_starts_with_the_exact_ids_or_is_refused(qwen3, tokenizer, completion, new):
    prompt = qwen3.render_ids([ASK], TOOLS)
    completion = ids([i for i in completion if i < len(tokenizer)])
    messages = [{"role": role, "content": "x <|im_end|>"} for role in new]
    bridged = qwen3.bridge_to_next_turn(prompt, completion, messages, TOOLS)
    if bridged is not None:
        assert bridged.dtype == np.int32
        assert bridged[: len(prompt) + len(completion)].tolist() == [*prompt, *completion]
        assert len(bridged) > len(prompt) + len(completion)


def test_a_bridge_over_someone_elses_assistant_message_is_refused(qwen3, tokenizer):
    assert qwen3.bridge_to_next_turn(qwen3.render_ids([ASK]), sampled(tokenizer, "a<|im_end|>"), [ANSWER, ASK]) is None


# -- reading completions


def read(renderer, tokenizer, text):
    return renderer.parse_response(sampled(tokenizer, text), renderer.render_ids([ASK], TOOLS))


def test_what_is_rendered_is_parsed_back(qwen3, tokenizer):
    for message in (ANSWER, THOUGHT, CALL, {**CALL, "content": "Let me see.", "reasoning_content": "Bonn."}):
        prompt = qwen3.render_ids([ASK], TOOLS)
        whole = qwen3.render_ids([ASK, message, SEES], TOOLS)
        close = whole[len(prompt) :].tolist().index(qwen3.stop_token_ids[0]) + 1
        parsed = qwen3.parse_response(whole[len(prompt) : len(prompt) + close], prompt)
        expected = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
        assert parsed.message() == {**expected, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize(
    ("body", "status", "name"),
    [
        ('{"name": "look", "arguments": {}}', "ok", "look"),
        ('{"name": "look"}', "malformed_structure", "look"),
        ('{"name": "look", "arguments": {"place": ', "invalid_json", None),
        ("", "invalid_json", None),
        ('{"name": "look", "arguments": ["Bonn"]}', "malformed_structure", "look"),
        ('{"name": "look", "arguments": "Bonn"}', "malformed_structure", "look"),
        ('{"name": "look", "arguments": 7}', "malformed_structure", "look"),
        ('{"name": "look", "arguments": null}', "malformed_structure", "look"),
        ('{"name": 7, "arguments": {}}', "malformed_structure", None),
        ('{"name": null, "arguments": {}}', "missing_name", None),
        ('{"arguments": {}}', "missing_name", None),
        ('["look", {}]', "malformed_structure", None),
        ('{"name": "look", "arguments": {"place": NaN}}', "invalid_json", "look"),
        ('{"name": "look", "arguments": {"place": 1e999}}', "invalid_json", "look"),
        ('{"name": "look", "arguments": {"place": "\\ud83d"}}', "invalid_json", "look"),
        ('{"name": "look\\ud83d", "arguments": {}}', "invalid_json", None),
        ("[" * 10_000, "invalid_json", None),
        ('{"name": "look", "arguments": {"place": ' + "1" * 5000 + "}}", "invalid_json", None),
        ('{"name": "look", "arguments": {"p": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}}", "invalid_json", "look"),
    ],
)
def test_a_call_that_cannot_be_used_has_a_status_that_says_why(qwen3, tokenizer, body, status, name):
    (call,) = read(qwen3, tokenizer, f"<tool_call>\n{body}\n</tool_call><|im_end|>").tool_calls
    assert (call.status, call.name) == (status, name)
    assert (call.arguments is None) == (status != "ok")
    assert body.strip()[:100] in call.raw


def called(arguments):
    return [
        ASK,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}],
        },
    ]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100, 300, 600, 700, 900, 5000, 100_000])
@pytest.mark.parametrize("shape", ['{"a": %s}', "%s"])
def test_arguments_whose_json_text_is_nested_too_deeply_are_refused(qwen3, template, depth, shape):
    for renderer in (qwen3, template):
        with pytest.raises(EnvironmentFault, match=f"message 1 .*nested deeper than {MAX_DEPTH} levels"):
            renderer.render_ids(called(shape % ("[" * depth + "]" * depth)), TOOLS)
    shallow = shape % ("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))
    assert "[" * 9 in qwen3.decode(qwen3.render_ids(called(shallow), TOOLS))


@pytest.mark.parametrize(
    "messages, said",
    [
        ([], "cannot write a conversation without messages"),
        ("hi", "the messages are of type str"),
        ([ASK, {"content": "x"}], 'message 1 has no role; expected "role"'),
        ([{**ASK, "more": {("a", 1): 2}}], "message 0 holds a key of type tuple"),
        ([{**ASK, "tool_calls": ["look"]}], 'message 0 has "tool_calls" that are not calls'),
    ],
)
def test_invalid_messages_are_refused_in_a_sentence(qwen3, messages, said):
    with pytest.raises(EnvironmentFault) as refused:
        qwen3.render_ids(messages)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None},
        {"properties": ["at"]},
        {"properties": {"at": "string"}},
        {"properties": {"at": {"type": "string", "description": 5}}},
    ],
)
def test_a_schema_that_a_family_cannot_write_is_the_environments_fault(parameters):
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with pytest.raises(EnvironmentFault, match="renderer \"nemotron-3\" refuses the schema of the tool 'look' "):
        family_renderer("nemotron-3").render_ids([ASK], [*TOOLS, tool])


@pytest.mark.parametrize(
    "place",
    [
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"type": "string"}, {"minLength": 2}]},
        {"not": {"type": "null"}},
        {"const": "Köln"},
        {"description": "Anything, <|im_end|> too."},
        {"$ref": "#/definitions/place"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}},
    ],
)
def test_kimi_declares_tools_in_json_where_its_own_form_has_no_words_for_them(place):
    """All tools, compact and with sorted keys, as the tokenizer that the model is published with does."""
    parameters = {"type": "object", "properties": {"at": place}, "definitions": {"place": {"type": "string"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "go", "description": "Go.", "parameters": parameters}}]
    renderer = family_renderer("kimi-k2.5")
    prompt = renderer.render_ids([ASK], tools)
    written = json.dumps(tools, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    declared = f"<|im_system|>tool_declare<|im_middle|>{written}<|im_end|>"
    assert renderer.decode(prompt) == declared + renderer.decode(renderer.render_ids([ASK]))
    close = renderer.stop_token_ids[0]
    assert np.count_nonzero(prompt == close) == 2, "one behind the tools, one behind the question"
    called = (
        "Look.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"place": "Bonn"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    completion = sampled(family_tokenizer("kimi-k2.5"), called)
    bridged = renderer.bridge_to_next_turn(prompt, completion, [SEES], tools)
    assert bridged[: len(prompt) + len(completion)].tolist() == [*prompt, *completion]
    message = {**CALL, "reasoning_content": "Look."}
    assert bridged.tolist() == renderer.render_ids([ASK, message, SEES], tools).tolist()


def test_kimi_writes_other_tools_in_its_own_form():
    renderer = family_renderer("kimi-k2.5")
    assert "namespace functions {" in renderer.decode(renderer.render_ids([ASK], TOOLS))


def test_an_unclosed_call_is_no_call(qwen3, tokenizer):
    parsed = read(qwen3, tokenizer, 'Well. <tool_call>\n{"name": "look", "arguments": {}}')
    assert [call.status for call in parsed.tool_calls] == ["unclosed_block"]
    assert parsed.content == "Well."
    assert "tool_calls" not in parsed.message()


def test_every_attempt_is_kept_in_order(qwen3, tokenizer):
    good = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call>'
    parsed = read(qwen3, tokenizer, f"{good}\n<tool_call>\n{{oops}}\n</tool_call>\n{good}<|im_end|>")
    assert [call.status for call in parsed.tool_calls] == ["ok", "invalid_json", "ok"]
    assert len(parsed.message()["tool_calls"]) == 2


def test_call_markup_inside_thinking_is_not_a_call(qwen3, tokenizer):
    parsed = read(qwen3, tokenizer, f"<think>\n{CALL_TEXT[:-10]}\n</think>\n\nno<|im_end|>")
    assert (parsed.tool_calls, parsed.content) == ((), "no")


@given(tokens=st.lists(st.integers(0, 10_000), max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_sampled_ids_make_the_parser_raise(qwen3, template, tokenizer, tokens):
    special = tokenizer.convert_tokens_to_ids(
        ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "<|im_end|>", "<tool_response>"]
    )
    completion = ids([special[t % 7] if t % 3 == 0 else t % len(tokenizer) for t in tokens])
    for renderer in (qwen3, template):
        for prompt in (None, renderer.render_ids([ASK], TOOLS)):
            parsed = renderer.parse_response(completion, prompt)
            json.dumps(parsed.message()).encode()
            assert all(call.status != "ok" or call.name for call in parsed.tool_calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "arguments", "x"]), inner),
    max_leaves=6,
)


@given(value=JSON, cut=st.integers(0, 60), ascii_only=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_json_of_any_shape_makes_the_parser_raise(qwen3, tokenizer, value, cut, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "replace").decode()
    parsed = read(qwen3, tokenizer, f"<tool_call>{text[: cut or None]}</tool_call>")
    assert len(parsed.tool_calls) == 1
    (call,) = parsed.tool_calls
    if call.status == "ok":
        assert isinstance(call.name, str) and isinstance(call.arguments, dict)
        json.dumps(call.arguments, allow_nan=False).encode()


def test_a_family_whose_tokens_are_missing_is_refused(tokenizer):
    with pytest.raises(ModelError, match=r'does not fit renderer "llama-3".*"auto"'):
        PackageRenderer(tokenizer, "llama-3")


def test_what_a_group_shares_is_rendered_once_and_cannot_be_written_to(tokenizer):
    renderer = PackageRenderer(tokenizer)
    first = renderer.render_ids([ASK], TOOLS)
    assert renderer.render_ids([dict(ASK)], [dict(tool) for tool in TOOLS]) is first
    assert renderer.render_ids([ASK], TOOLS, False) is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0
    for number in range(200):
        renderer.render_ids([{"role": "user", "content": str(number)}])
    again = renderer.render_ids([ASK], TOOLS)
    assert again is not first and np.array_equal(again, first)
