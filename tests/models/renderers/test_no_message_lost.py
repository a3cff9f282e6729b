"""Between messages and ids no text is lost: it is in the prompt once and in order, or its field is refused."""

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from families import FAMILIES, MORE, family_renderer, family_tokenizer
from random_dialogues import byte_tokenizer
from test_bridge_campaign import TEMPLATES, TEXTLESS

from campaigns import sized
from lost_messages import Talk, end_of_answer, lost
from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.core.types import ToolCall
from verbatim.models.renderers import Conversation, create_renderer
from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.models.renderers.tool_support import COMPLETE

FORMATS = [*FAMILIES, *MORE, *(f"{name}.jinja" for name in TEMPLATES if name not in TEXTLESS)]
QUICK = [
    *FAMILIES,
    *MORE,
    "gptoss.jinja",
    "muse_glimmer.jinja",
    "gemma.jinja",
    "cohere.jinja",
    "gemma4.jinja",
    "deepseek_r1_distill.jinja",
    "qwen3_5_think.jinja",
    "phi3.jinja",
]


@cache
def made(name):
    if not name.endswith(".jinja"):
        return family_renderer(name)
    return create_renderer("template", byte_tokenizer(TEMPLATES[name.removesuffix(".jinja")]))


def outcome(name, seed):
    """ "written", "refused", "no tools"; or what is wrong."""
    renderer, talk = made(name), Talk(seed, with_tools=seed % 3 > 0)
    try:
        ids = renderer.render_ids(talk.messages, talk.tools)
    except ModelError:
        return "no tools"
    except EnvironmentFault as error:
        return "refused" if re.match(r"messages\[\d+\]", str(error)) else f"without a field: {error}"
    return str(lost(talk.messages, renderer.decode(ids), thoughts=is_harmony(name)) or "written")


def is_harmony(name):
    return name.startswith(("gptoss", "gpt-oss"))


def continued(name, seed):
    """The same of what is appended to a sampled turn, whose ids stay as they are."""
    renderer, talk = made(name), Talk(seed, with_tools=seed % 3 > 0)
    before = len(talk.messages)
    talk.turn()
    turn = talk.messages[before]
    talk.appended()
    new = talk.messages[before + 1 :]
    calls = tuple(ToolCall(name="look", arguments={}, id=call["id"]) for call in turn.get("tool_calls", ()))
    end = end_of_answer(renderer) if name.endswith(".jinja") else renderer.stop_token_ids[0]
    sampled = np.array([*renderer.tokenizer.encode("sampled"), end], dtype=np.int32)
    try:
        conversation = Conversation.open(renderer, talk.messages[:before], talk.tools)
        conversation = conversation.answered(sampled, ParsedResponse(content=turn["content"], tool_calls=calls), turn)
        following = conversation.continued(new, talk.tools) if new else conversation
    except ModelError:
        return "no tools"
    except EnvironmentFault as error:
        return "refused" if re.match(r"messages\[\d+\]", str(error)) else f"without a field: {error}"
    if following.extends:
        size = len(conversation.prompt_ids) + len(sampled)
        return str(lost(new, renderer.decode(following.prompt_ids[size:])) or "bridged")
    return str(lost(following.messages, renderer.decode(following.prompt_ids), thoughts=is_harmony(name)) or "written")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", sized(QUICK, FORMATS))
def test_each_text_is_written_once_or_refused_by_its_field(name, campaign):
    row, found = campaign("messages to prompts: written once, or refused by field"), Counter()
    for seed in range(sized(24, 300)):
        for tried in (outcome, continued):
            how = tried(name, seed)
            found[how] += 1
            row.add(wrong=how not in ("written", "bridged", "refused", "no tools"))
    assert set(found) <= {"written", "bridged", "refused", "no tools"}
    assert found["written"] + found["bridged"] >= row.cases // 8


def test_a_lost_message_is_found():
    """The campaign can fail."""
    renderer = made("qwen3-vl")
    talk = [
        {"role": "system", "content": "mk001q"},
        {"role": "system", "content": "mk002q"},
        {"role": "user", "content": "mk003q"},
    ]
    assert lost(talk, renderer.decode(renderer.render_ids(talk))) == []
    dropped = renderer.decode(renderer.write_ids(talk, None, True))
    assert lost(talk, dropped) == ["mk002q of messages[1] is there 0 times"]
    swapped = renderer.decode(renderer.render_ids([talk[0], {"role": "user", "content": "mk003q mk002q"}]))
    assert lost(talk, swapped) == ["['mk003q'] stand before ['mk002q']"]


SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "In German."}
ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hallo"}
LATE = {"role": "system", "content": "It is late."}
NOW = {"role": "user", "content": "And now?"}
FOLDED = {
    "qwen3.5": "<|im_start|>system\nBe brief.\n\nIn German.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHallo<|im_end|>\n<|im_start|>user\nIt is late.<|im_end|>\n<|im_start|>user\nAnd now?"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "qwen3": "<|im_start|>system\nBe brief.\n\nIn German.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHallo<|im_end|>\n<|im_start|>system\nIt is late.<|im_end|>\n<|im_start|>user\nAnd now?"
    "<|im_end|>\n<|im_start|>assistant\n",
    "gemma.jinja": "<bos><start_of_turn>user\nBe brief.\n\nIn German.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    "Hallo<end_of_turn>\n<start_of_turn>user\nIt is late.\n\nAnd now?<end_of_turn>\n<start_of_turn>model\n",
    "gptoss.jinja": "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nIn German.\n\n<|end|>"
    "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hallo<|end|>"
    "<|start|>user<|message|>It is late.<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant",
}
"""One system message leads, and a later one stays in its place: as a system message (Qwen3 writes it), as a user's, or
in the user's message behind it (Gemma takes no two users in a row)."""


@pytest.mark.parametrize("name", FOLDED)
def test_a_system_message_that_the_format_does_not_write_is_folded(name):
    renderer = made(name)
    text = renderer.decode(renderer.render_ids([SYSTEM, DEVELOPER, ASK, ANSWER, LATE, NOW]))
    assert text[-len(FOLDED[name]) :] == FOLDED[name]


@pytest.mark.parametrize(
    ("name", "messages", "field"),
    [
        ("qwen3.5", [SYSTEM, DEVELOPER, ASK], "messages[0].content: "),
        ("qwen3-vl", [ASK, ANSWER, LATE, NOW], "messages[2].content: "),
        ("gpt-oss", [SYSTEM, ASK, DEVELOPER], "messages[2].content: "),
    ],
)
def test_nothing_is_folded_where_it_is_to_be_refused(name, messages, field):
    renderer = create_renderer(name, family_tokenizer(name), later_system="refuse")
    with pytest.raises(EnvironmentFault, match=re.escape(field)) as refused:
        renderer.render_ids(messages)
    assert 'later_system = "fold"' in str(refused.value)
    assert len(renderer.render_ids([SYSTEM, ASK]))


def calling(*arguments, text=""):
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": f"call0000{n}", "type": "function", "function": {"name": "look", "arguments": given}}
            for n, given in enumerate(arguments)
        ],
    }


def sees(number):
    return {"role": "tool", "content": "20", "tool_call_id": f"call0000{number}", "name": "look"}


AT = {"at": "Bonn"}
REFUSED = [
    ("llama-3", [ASK, calling(AT, text="Let me see."), sees(0)], "messages[1].content: "),
    ("muse_glimmer.jinja", [ASK, calling(AT, text="Let me see."), sees(0)], "messages[1].content: "),
    ("qwen3.5", [SYSTEM, DEVELOPER, ASK, calling("{oops"), sees(0)], "messages[3].tool_calls[0].function.arguments: "),
    ("llama-3", [ASK, calling(AT, AT), sees(0), sees(1)], "messages[1].tool_calls[1]: "),
    ("gpt-oss", [ASK, calling(AT, AT), sees(0), sees(1)], "messages[1].tool_calls[1]: "),
    ("gptoss.jinja", [ASK, calling(AT, AT), sees(0), sees(1)], "messages[1].tool_calls[1]: "),
    ("qwen3.5", [ASK, calling("{oops"), sees(0)], "messages[1].tool_calls[0].function.arguments: "),
    ("qwen3.5", [SYSTEM, ASK, calling(AT, "[1]"), sees(0)], "messages[2].tool_calls[1].function.arguments: "),
    ("glm-4.5", [ASK, calling("{oops"), sees(0)], "messages[1].tool_calls[0].function.arguments: "),
    ("qwen3_5_think.jinja", [ASK, calling("{oops"), sees(0)], "messages[1].tool_calls[0].function.arguments: "),
    ("cohere2.jinja", [ASK, ANSWER, ANSWER, NOW], "messages[2]: "),
]


@pytest.mark.parametrize(("name", "messages", "field"), REFUSED)
def test_a_part_that_the_format_leaves_out_is_refused_by_its_field(name, messages, field):
    with pytest.raises(EnvironmentFault, match="^" + re.escape(field)):
        made(name).render_ids(messages)


def test_a_later_system_message_continues_what_was_sampled():
    renderer = made("qwen3-vl")
    conversation = Conversation.open(renderer, [SYSTEM, ASK])
    sampled = np.array(renderer.tokenizer.encode("Hallo<|im_end|>"), dtype=np.int32)
    following = conversation.answered(sampled).continued([LATE, NOW])
    before = [*conversation.prompt_ids.tolist(), *sampled.tolist()]
    assert following.prompt_ids[: len(before)].tolist() == before
    assert renderer.decode(following.prompt_ids[len(before) :]) == (
        "\n<|im_start|>user\nIt is late.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert following.messages == (SYSTEM, ASK, ANSWER, LATE, NOW)


def test_a_shape_is_rendered_once():
    renderer, rendered = create_renderer("qwen3-vl", family_tokenizer("qwen3-vl")), []
    write = renderer.write_ids
    renderer.write_ids = lambda *given: rendered.append(given) or write(*given)
    messages = [SYSTEM, ASK]
    renderer.render_ids(messages)
    for number in range(5):
        messages += [{**ANSWER, "content": f"yes {number}"}, {**NOW, "content": f"so {number}?"}]
        renderer.render_ids(messages)
    # The 6 conversations, and 4 shapes: the opening and an answered turn, each at the end and before another turn.
    assert len(rendered) == 6 + 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<|channel|>final<|message|>look(<|end|><|start|>user<|message|>20<|end|><|start|>assistant"),
        ("gemma4.jinja", "<|turn>model\nlook(<turn|>\n<|turn>user\n20<turn|>\n<|turn>model\n"),
        ("qwen3", "<|im_start|>user\n<tool_response>\n20\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_an_answer_where_no_call_was_read_is_a_users_if_the_format_writes_answers_only_to_calls(name, text):
    renderer = made(name)
    renderer.tool_support = COMPLETE
    messages = [ASK, {"role": "assistant", "content": "look("}, sees(0)]
    assert renderer.decode(renderer.render_ids(messages)).endswith(text)
