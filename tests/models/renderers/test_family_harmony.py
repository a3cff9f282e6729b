"""gpt-oss without a download: the ids of its own chat template, calls read by channel, a bridge after a call only."""

import copy
import socket

import numpy as np
import pytest
from families import family_renderer, family_tokenizer

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.harmony import HarmonyRenderer

ASK = {"role": "user", "content": "How warm is it?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "", "type": "function", "function": {"name": "look", "arguments": {"place": "Bonn"}}}],
}
SEES = {"role": "tool", "content": "20 °C", "name": "look"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at the sky.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
SAMPLED_CALL = (
    "<|channel|>analysis<|message|>Bonn, then.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
    '<|constrain|>json<|message|>{"place": "Bonn"}<|call|>'
)
TOOL_TURN = '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"20 °C"<|end|><|start|>assistant'


@pytest.fixture(scope="module")
def tokenizer():
    return family_tokenizer("gpt-oss")


@pytest.fixture(scope="module")
def harmony():
    return family_renderer("gpt-oss")


def ids(tokenizer, text):
    return np.asarray(tokenizer.encode(text), dtype=np.int32)


def test_it_is_made_and_used_without_a_network(tokenizer, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    for name in ("gpt-oss", "auto"):
        renderer = create_renderer(name, tokenizer)
        assert renderer.name == "gpt-oss"
        assert renderer.decode(renderer.render_ids([ASK])).endswith("<|end|><|start|>assistant")


def test_a_turn_ends_with_an_answer_or_a_call(harmony, tokenizer):
    assert harmony.stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>", "<|endoftext|>"]))


def test_analysis_is_reasoning_and_a_commentary_to_a_function_is_a_call(harmony, tokenizer):
    read = harmony.parse_response(ids(tokenizer, SAMPLED_CALL))
    assert (read.content, read.reasoning_content) == ("", "Bonn, then.")
    assert [(c.name, c.arguments, c.status) for c in read.tool_calls] == [("look", {"place": "Bonn"}, "ok")]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "statuses"),
    [
        ("<|channel|>final<|message|>20.<|return|>", "20.", None, []),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>20.<|return|>",
            "20.",
            "hm",
            [],
        ),
        ("<|channel|>analysis<|message|>cut o", "", "cut o", []),
        (
            "<|channel|>commentary<|message|>Let me see.<|end|>" + f"<|start|>assistant{SAMPLED_CALL}",
            "Let me see.",
            "Bonn, then.",
            ["ok"],
        ),
        (" to=functions.look<|channel|>commentary json<|message|>{}<|call|>", "", None, ["ok"]),
        (SAMPLED_CALL.removesuffix("<|call|>"), "", "Bonn, then.", ["unclosed_block"]),
        (SAMPLED_CALL.replace("}", ""), "", "Bonn, then.", ["invalid_json"]),
        (SAMPLED_CALL.replace('{"place": "Bonn"}', "[1]"), "", "Bonn, then.", ["malformed_structure"]),
        (SAMPLED_CALL.replace("look", ""), "", "Bonn, then.", ["missing_name"]),
        ("no header at all<|return|>", "no header at all", None, []),
        ("", "", None, []),
    ],
)
def test_what_is_sampled_is_read_by_channel(harmony, tokenizer, text, content, reasoning, statuses):
    read = harmony.parse_response(ids(tokenizer, text))
    assert (read.content, read.reasoning_content) == (content, reasoning)
    assert [call.status for call in read.tool_calls] == statuses


def test_a_bridge_after_a_call_is_what_was_sampled_and_the_templates_own_tool_turn(harmony, tokenizer):
    prompt, completion = harmony.render_ids([ASK], TOOLS), ids(tokenizer, SAMPLED_CALL)
    found = harmony.bridge_to_next_turn(prompt, completion, [SEES], TOOLS)
    assert found.tolist() == [*prompt, *completion, *tokenizer.encode(TOOL_TURN)]
    rendered = tokenizer.decode(harmony.render_ids([ASK, {**CALL, "reasoning_content": "Bonn, then."}, SEES], TOOLS))
    assert rendered.endswith(TOOL_TURN)
    assert "<|channel|>analysis<|message|>Bonn, then.<|end|>" in rendered


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("<|channel|>final<|message|>20.<|return|>", [ASK]),  # the close becomes <|end|>
        ("<|channel|>final<|message|>20.<|return|>", [SEES]),
        (SAMPLED_CALL, [ASK]),
        (SAMPLED_CALL, [SEES, ASK]),
        (SAMPLED_CALL, []),
        (SAMPLED_CALL.removesuffix("<|call|>"), [SEES]),
        (SAMPLED_CALL.replace("look", ""), [SEES]),
        (f"{SAMPLED_CALL}<|start|>assistant{SAMPLED_CALL}", [SEES]),
    ],
)
def test_any_other_bridge_is_refused(harmony, tokenizer, text, new):
    assert harmony.bridge_to_next_turn(harmony.render_ids([ASK], TOOLS), ids(tokenizer, text), new, TOOLS) is None


def test_the_name_of_a_sampled_function_stays_text(harmony, tokenizer):
    odd = SAMPLED_CALL.replace("look", "lo\\u003cok")
    found = harmony.bridge_to_next_turn(harmony.render_ids([ASK], TOOLS), ids(tokenizer, odd), [SEES], TOOLS)
    assert "functions.lo\\u003cok to=assistant" in tokenizer.decode(found)


def test_what_is_said_aloud_before_a_call_joins_its_analysis(harmony, tokenizer):
    # The template refuses both.
    both = {**CALL, "content": "Let me see.", "reasoning_content": "Bonn, then."}
    text = tokenizer.decode(harmony.render_ids([ASK, both, SEES], TOOLS))
    assert "<|channel|>analysis<|message|>Bonn, then.\nLet me see.<|end|>" in text


def test_two_calls_in_one_message_are_refused_since_the_second_would_be_dropped(harmony):
    with pytest.raises(EnvironmentFault, match="contains 2 calls"):
        harmony.render_ids([ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}], TOOLS)


def test_arguments_given_as_json_text_are_not_quoted_twice(harmony):
    function = {"name": "look", "arguments": '{"place":"Bonn"}'}
    as_text = {**CALL, "tool_calls": [{"type": "function", "function": function}]}
    assert harmony.render_ids([ASK, as_text], TOOLS).tolist() == harmony.render_ids([ASK, CALL], TOOLS).tolist()


@pytest.mark.parametrize("blank", ["", "  ", None])
def test_blank_arguments_are_an_object_without_members(harmony, tokenizer, blank):
    call = {"type": "function", "function": {"name": "look", "arguments": blank}}
    text = tokenizer.decode(harmony.render_ids([ASK, {**CALL, "tool_calls": [call]}, SEES], TOOLS))
    assert "<|message|>{}<|call|>" in text


def test_messages_that_the_template_refuses_are_the_environments_fault(harmony):
    with pytest.raises(EnvironmentFault, match=r"no previous assistant message with a tool call.*roles are user, tool"):
        harmony.write_ids([ASK, SEES], TOOLS, True)


def test_an_answer_where_no_call_was_read_is_a_users_message_and_one_before_all_turns_is_refused(harmony):
    turn, said_by_user = {"role": "assistant", "content": "Hm."}, {"role": "user", "content": SEES["content"]}
    folded = harmony.render_ids([ASK, turn, SEES], TOOLS)
    assert folded.tolist() == harmony.render_ids([ASK, turn, said_by_user], TOOLS).tolist()
    with pytest.raises(EnvironmentFault, match=r"messages\[1\].*no previous assistant message with a tool call"):
        harmony.render_ids([ASK, SEES], TOOLS)


def test_a_template_of_another_format_is_refused(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = family_tokenizer("qwen3").chat_template
    with pytest.raises(ModelError, match='does not write the format of renderer "gpt-oss"'):
        HarmonyRenderer(other)
    assert create_renderer("auto", other).name == "template"


def test_a_tokenizer_without_the_template_or_the_tokens_is_refused(tokenizer):
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        HarmonyRenderer(without)
    with pytest.raises(ModelError, match=r"no token <\|start\|>"):
        HarmonyRenderer(family_tokenizer("qwen3"))
