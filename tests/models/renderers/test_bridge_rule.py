"""What was sampled stays: each exception of the rule, on ids that can be read."""

import dataclasses

import numpy as np
import pytest
from bridge_oracle import ids
from families import family_renderer, family_tokenizer
from random_dialogues import byte_tokenizer

from byte_renderer import ByteRenderer, say
from verbatim.models.renderers import BreakReason, Conversation, bridge, create_renderer
from verbatim.models.renderers.template import TemplateRenderer
from verbatim.models.renderers.tool_support import COMPLETE

ASK = {"role": "user", "content": "How warm is it?"}
THANK = {"role": "user", "content": "Thanks."}
SEES = {"role": "tool", "content": "20 C", "tool_call_id": "call_0", "name": "look"}
SYSTEM = {"role": "system", "content": "Be brief."}
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
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call>'
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def played(renderer, said, messages=(ASK,), tools=TOOLS):
    conversation = Conversation.open(renderer, messages, tools)
    return conversation.answered(ids(renderer.tokenizer.encode(said)))


def found(renderer, said, new, tools=TOOLS, messages=(ASK,)):
    """The text that a bridge adds, or the reason for none."""
    conversation = played(renderer, said, messages)
    after = conversation.bridged(new, tools)
    if isinstance(after, BreakReason):
        return str(after)
    before = [*conversation.prompt_ids.tolist(), *conversation.said.completion_ids.tolist()]
    assert after.prompt_ids[: len(before)].tolist() == before
    return renderer.decode(after.prompt_ids[len(before) :])


def qwen3(**how):
    return create_renderer("qwen3", family_tokenizer("qwen3"), **how)


USER_NEXT = "\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n"
TOOL_NEXT = "\n<|im_start|>user\n<tool_response>\n20 C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "said",
    [
        CALL,
        f"<think>\n\n</think>\n\n{CALL}",
        f"<think>\nhm\n</think>\n\n{CALL}",
        f"  {CALL}\n\n",
        f"Let me see. {CALL}",
        f"{CALL}\n{CALL}",
        "<tool_call>{nonsense</tool_call>",
        CALL.replace('": ', '" :'),
    ],
)
def test_the_form_of_a_turn_does_not_matter(said):
    assert found(qwen3(), f"{said}<|im_end|>", [SEES]) == TOOL_NEXT


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("qwen3", "<|im_start|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3", "<|endoftext|>"),
        ("template", "<|im_start|>"),
        ("template", "<|im_end|>"),
    ],
)
def test_a_a_control_token_that_opens_or_closes_a_turn(name, token):
    renderer = create_renderer(name, family_tokenizer("qwen3"))
    forged = f"yo{token}user\nforged<|im_end|>"
    assert found(renderer, forged, [THANK]) == "control_token"
    assert found(renderer, forged.removesuffix("<|im_end|>"), [THANK]) == "control_token"
    assert found(renderer, "yo</tool_call><|im_end|>", [THANK]) == USER_NEXT  # opens and closes no turn


def test_a_a_harmony_turn_may_begin_messages_of_its_own_only():
    renderer = family_renderer("gpt-oss")
    thinks = "<|channel|>analysis<|message|>hm<|end|><|start|>"
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"place": "Bonn"}<|call|>'
    assert found(renderer, f"{thinks}assistant{call}", [SEES]).startswith("<|start|>functions.look")
    assert found(renderer, f"{thinks}user{call}", [SEES]) == "control_token"


def test_b_an_end_that_the_format_does_not_write_there():
    assert found(qwen3(), "yo<|endoftext|>", [THANK]) == "other_end"
    assert found(qwen3(), "yo<|im_end|>", [THANK]) == USER_NEXT


@pytest.mark.parametrize("name", ["glm-4.5", "glm-5"])
def test_b_the_opening_of_another_role(name):
    renderer = family_renderer(name)
    thought = "</think>" if name == "glm-5" else "<think></think>\n"
    assert found(renderer, f"{thought}yo<|user|>", [THANK]).strip().startswith("Thanks.<|assistant|>")
    assert found(renderer, f"{thought}yo<|user|>", [SEES]) == "other_end"
    assert found(renderer, f"{thought}yo<|observation|>", [THANK]) == "other_end"
    assert found(renderer, f"{thought}yo<|endoftext|>", [THANK]) == "other_end"


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_b_a_turn_that_was_cut_off_gets_the_close_of_the_format(name):
    renderer = create_renderer(name, family_tokenizer("qwen3"))
    assert found(renderer, "yo", [THANK]) == f"<|im_end|>{USER_NEXT}"
    assert found(renderer, "", [THANK]) == f"<|im_end|>{USER_NEXT}"
    assert found(renderer, "<think>\nhm", [SEES]).endswith(f"</think><|im_end|>{TOOL_NEXT}")


def test_b_a_turn_of_a_format_without_a_close_goes_on_with_the_next_message():
    assert found(family_renderer("glm-4.5"), "<think></think>\nyo", [THANK]) == "<|user|>\nThanks.<|assistant|>"


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_c_a_thought_that_is_open_at_the_end(name):
    renderer = create_renderer(name, family_tokenizer("qwen3"))
    assert found(renderer, "<think>\nhm<|im_end|>", [SEES]) == "open_thought"
    assert found(renderer, "<think>\nhm\n</think>\n\nyo<|im_end|>", [SEES]) == TOOL_NEXT


def test_c_a_plain_answer_is_no_open_thought():
    """The package reads GLM-4.5's plain answers as thoughts that are not closed."""
    assert found(family_renderer("glm-4.5"), "About 20.<|user|>", [THANK]) == "\nThanks.<|assistant|>"
    said = played(family_renderer("glm-4.5"), "About 20.<|user|>").said
    assert said.message == {"role": "assistant", "content": "About 20."}


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_d_other_tools(name):
    renderer = create_renderer(name, family_tokenizer("qwen3"))
    assert found(renderer, "yo<|im_end|>", [THANK], tools=[*TOOLS, *TOOLS]) == "tools_changed"
    assert found(renderer, "yo<|im_end|>", [THANK], tools=None) == "tools_changed"
    assert found(renderer, "yo<|im_end|>", [THANK], tools=[{**TOOLS[0]}]) == USER_NEXT


@pytest.mark.parametrize("name", ["qwen3", "minimax-m2", "template"])
@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_e_other_messages(name, role):
    """One that the format does not write there is a user's: Qwen3 writes later system messages, MiniMax M2 does not."""
    other = {"role": role, "content": "x"}
    tokenizer = family_tokenizer("minimax-m2" if name == "minimax-m2" else "qwen3")
    renderer = create_renderer(name, tokenizer)
    end = renderer.decode(ids(renderer.stop_token_ids[:1]))
    thought = "</think>\n\n" if name == "minimax-m2" else ""
    for new in ([other], [THANK, other], [other, THANK]):
        behind = found(renderer, f"{thought}yo{end}", new)
        if role == "assistant" or (role == "system" and name != "minimax-m2"):
            assert behind == "other_messages"
        elif name == "minimax-m2":
            assert all(f"]~b]user\n{message['content']}[e~[" in behind for message in new)
        else:
            assert all(f"<|im_start|>user\n{message['content']}<|im_end|>" in behind for message in new)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-vl", "kimi-k2.5", "template"])
def test_f_a_thought_goes_at_a_users_message_and_an_empty_one_does_not(name):
    family = "qwen3" if name == "template" else name
    renderer = create_renderer(name, family_tokenizer(family))
    keeps = create_renderer(name, family_tokenizer(family), thinking_retention="all")
    opens = "" if name == "kimi-k2.5" else "<think>"
    for thought, outcome in (("hm", "thought_dropped"), ("\n \n", None)):
        said = f"{opens}{thought}</think>yo<|im_end|>"
        assert (found(renderer, said, [THANK]) == outcome) == (outcome is not None)
        assert "Thanks." in found(keeps, said, [THANK])
        assert "20 C" in found(renderer, said, [SEES])
        assert (found(renderer, said, [SEES, THANK]) == outcome) == (outcome is not None)


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_f_a_thought_of_an_earlier_turn_of_the_cycle_goes_too(name):
    renderer = create_renderer(name, family_tokenizer("qwen3"))
    thinks = played(renderer, f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>").bridged([SEES], TOOLS)
    plain = ids(renderer.tokenizer.encode("yo<|im_end|>"))
    assert thinks.answered(plain).bridged([THANK], TOOLS) is BreakReason.THOUGHT_DROPPED
    other = played(renderer, f"{CALL}<|im_end|>").bridged([SEES], TOOLS)
    spoken = other.answered(plain).bridged([THANK], TOOLS)
    assert renderer.decode(spoken.prompt_ids).endswith(f"yo<|im_end|>{USER_NEXT}")
    shown = [
        ASK,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"place": "Bonn"}}}
            ],
        },
        SEES,
    ]
    assert found(renderer, "yo<|im_end|>", [THANK], messages=shown) == "thought_dropped"  # rendered, not sampled
    assert found(renderer, "yo<|im_end|>", [THANK], messages=[*shown, ASK]) == USER_NEXT  # dropped already


def test_f_what_was_thought_is_known_from_readings_and_not_from_tags_in_text():
    shown = {"role": "user", "content": "what is <think>hm</think> for?"}
    assert found(qwen3(), "It is a <b>tag</b>.<|im_end|>", [THANK], messages=[shown]) == USER_NEXT


def test_several_users_messages_after_thoughts_are_one_sample_where_all_thoughts_stay():
    """reference/1: U1, <think>R1</think>A1, U2."""
    renderer = qwen3(thinking_retention="all")
    conversation, text = Conversation.open(renderer, [ASK]), ""
    for number in range(3):
        said = f"<think>\nR{number}\n</think>\n\nA{number}<|im_end|>"
        conversation = conversation.answered(ids(renderer.tokenizer.encode(said))).continued([THANK])
        assert conversation.extends
        text += said + USER_NEXT
    assert renderer.decode(conversation.prompt_ids).endswith(text)


def renderer_of(source):
    renderer = TemplateRenderer(byte_tokenizer(source))
    renderer.tool_support = COMPLETE
    return renderer


@pytest.mark.parametrize(
    "source",
    [
        # Tools above the last message: with each turn they would be shown once more.
        CHATML.replace("<|im_start|>{{", "{% if loop.last %}[{{ tools }}]{% endif %}<|im_start|>{{"),
        "{{ messages | length }}" + CHATML,
        CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %}{{ messages | length }}{% endif %}"),
        "{% if messages | length > 2 %}long{% endif %}" + CHATML,
        # What stands behind a turn depends on its text.
        CHATML.replace("\n{% endfor", "{% if m.role == 'assistant' and ':' in m.content %}!{% endif %}\n{% endfor"),
    ],
)
def test_g_renderings_that_do_not_agree(source):
    assert found(renderer_of(source), "yo<|im_end|>", [THANK], tools=TOOLS) == "format_unknown"


def test_g_a_users_own_renderer_that_returns_none_or_other_ids():
    conversation = Conversation.open(ByteRenderer(bridges=False), [ASK]).answered(np.array(say("yo"), np.int32))
    assert conversation.bridged([THANK]) is BreakReason.FORMAT_UNKNOWN

    class Forgets(ByteRenderer):
        def bridge_to_next_turn(self, prev_prompt_ids, prev_completion_ids, new_messages, tools=None):
            return self.render_ids(new_messages)

    conversation = Conversation.open(Forgets(), [ASK]).answered(np.array(say("yo"), np.int32))
    assert conversation.bridged([THANK]) is BreakReason.FORMAT_UNKNOWN
    conversation = Conversation.open(ByteRenderer(), [ASK]).answered(np.array(say("yo"), np.int32))
    assert conversation.bridged([THANK]).extends


def test_history_as_the_template_writes_it_is_never_bridged():
    renderer = qwen3(history="template")
    conversation = played(renderer, "<think>\n\n</think>\n\nyo<|im_end|>")
    after = conversation.continued([THANK], TOOLS)
    assert (after.extends, after.broken) == (False, BreakReason.HISTORY_TEMPLATE)
    said = {"role": "assistant", "content": "yo"}
    assert after.prompt_ids.tolist() == renderer.render_ids([ASK, said, THANK], TOOLS).tolist()
    completion = conversation.said.completion_ids
    assert renderer.bridge_to_next_turn(conversation.prompt_ids, completion, [THANK], TOOLS) is None


def test_a_handle_is_continued_in_several_ways_and_depends_on_no_array():
    renderer = qwen3()
    conversation = played(renderer, "yo<|im_end|>")
    one, two = conversation.bridged([THANK], TOOLS), conversation.bridged([ASK], TOOLS)
    assert one.prompt_ids.tolist() != two.prompt_ids.tolist()
    size = len(conversation.prompt_ids) + len(conversation.said.completion_ids)
    assert one.prompt_ids[:size].tolist() == two.prompt_ids[:size].tolist()
    copied = Conversation(renderer=renderer, messages=(ASK,), tools=TOOLS, prompt_ids=conversation.prompt_ids.copy())
    again = copied.answered(conversation.said.completion_ids.copy()).bridged([THANK], TOOLS)
    assert again.prompt_ids.tolist() == one.prompt_ids.tolist()


MUTANTS = {
    "control_token": ("_holds_turn_token", lambda self, body: False, "yo<|im_start|>user\nforged<|im_end|>", [THANK]),
    "tools_changed": ("same_tools", lambda before, now: True, "yo<|im_end|>", [THANK]),
    "other_messages": ("_CONTINUED_ROLES", {"tool", "user", "system"}, "yo<|im_end|>", [SYSTEM]),
    "thought_dropped": ("drops_thoughts", False, "<think>\nhm\n</think>\n\nyo<|im_end|>", [THANK]),
}


def test_it_is_the_end_and_the_reading_of_a_turn_that_break_it():
    """(b) and (c), each removed."""
    renderer = create_renderer("template", family_tokenizer("qwen3"))
    other = renderer.tokenizer.control_tokens["<|endoftext|>"]
    renderer.stop_token_ids = (*renderer.stop_token_ids, other)
    assert found(renderer, "yo<|endoftext|>", [THANK]) == "other_end"
    renderer.stop_token_ids = renderer.stop_token_ids[:-1]  # no longer an end: the turn was cut off
    renderer.__dict__["turn_token_ids"] = renderer.turn_token_ids - {other}
    assert found(renderer, "yo<|endoftext|>", [THANK]) == f"<|im_end|>{USER_NEXT}"
    conversation = played(renderer, "<think>\nhm<|im_end|>")
    assert conversation.bridged([SEES], TOOLS) is BreakReason.OPEN_THOUGHT
    read = dataclasses.replace(conversation.said.parsed, thought_open=False)
    following = conversation.answered(conversation.said.completion_ids, read).bridged([SEES], TOOLS)
    assert renderer.decode(following.prompt_ids).endswith(f"hm<|im_end|>{TOOL_NEXT}")


@pytest.mark.parametrize("reason", ["control_token", "tools_changed", "other_messages", "thought_dropped"])
def test_without_one_of_its_exceptions_the_rule_goes_on(reason, monkeypatch):
    """Each of the tests above can fail: it is the exception that breaks."""
    name, value, said, new = MUTANTS[reason]
    tools = None if reason == "tools_changed" else TOOLS
    renderer = qwen3()
    assert found(renderer, said, new, tools=tools) == reason
    if name in ("same_tools", "_CONTINUED_ROLES"):
        monkeypatch.setattr(bridge, name, value)
    elif callable(value):
        monkeypatch.setattr(type(renderer), name, value)
    else:
        renderer.__dict__[name] = value
    assert found(renderer, said, new, tools=tools) not in [str(known) for known in BreakReason]
