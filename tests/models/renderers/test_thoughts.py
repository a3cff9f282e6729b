"""What a family reads as thinking, and that a call which was written inside of a thought is not made."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from families import FAMILIES, MORE, TEMPLATES, family_renderer, family_tokenizer, source_renderer
from random_dialogues import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.models.renderers import create_renderer

ASK = {"role": "user", "content": "Where?"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}

HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
XML = "<tool_call>\n<function=look>\n<parameter=at>\ndoor\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>look<arg_key>at</arg_key><arg_value>door</arg_value></tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": "door"}<|tool_call_end|><|tool_calls_section_end|>'
)
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">door'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
CALLS = {
    "qwen3": HERMES,
    "qwen3-vl": HERMES,
    "qwen3.5": XML,
    "glm-5": GLM,
    "glm-4.5": GLM,
    "kimi-k2": KIMI,
    "kimi-k2.5": KIMI,
    "nemotron-3": XML,
    "qwen3.6": XML,
    "qwen3.8": XML,
    "nemotron-3-ultra": XML,
    "deepseek-v4": DSML,
    "minimax-m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">door</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"at": "door"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
"""A call as each family writes it; gpt-oss thinks in messages of their own, and llama-3 does not think."""


@cache
def deepseek_v4():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = (
        *(
            f"<｜{word}｜>"
            for word in (
                "begin▁of▁sentence",
                "end▁of▁sentence",
                "User",
                "Assistant",
                "latest_reminder",
                "action",
                "query",
                "authority",
                "domain",
                "title",
                "read_url",
            )
        ),
        "｜DSML｜",
        "<think>",
        "</think>",
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return create_renderer("deepseek-v4", PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[1]))


def template_renderer(name):
    return create_renderer("template", byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")))


def renderer_of(name):
    return deepseek_v4() if name == "deepseek-v4" else family_renderer(name)


def read(name, opening, sampled, *, ended=True):
    """A completion behind a prompt whose last words are `opening`: None for the family's own."""
    renderer = renderer_of(name)
    prompt = renderer.write_ids([ASK], None, True).tolist()
    if opening is not None:
        marks = [place for place, i in enumerate(prompt) if renderer.decode([i]) in ("<think>", "</think>")]
        prompt = prompt[: min(marks, default=len(prompt))]
        prompt += renderer.tokenizer.encode(opening)
    ids = renderer.tokenizer.encode(sampled) + [renderer.stop_token_ids[0]] * ended
    return renderer.parse_response(np.array(ids, dtype=np.int32), np.array(prompt, dtype=np.int32), [LOOK])


def test_every_family_that_thinks_between_marks_is_here():
    assert set(CALLS) == {*FAMILIES, *MORE, "deepseek-v4"} - {"gpt-oss", "llama-3"}


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("opening", "mark"), [("<think>", ""), ("", "<think>"), ("<think></think>", "\n<think>")])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_a_closed_thought_is_thinking_only(name, opening, mark, ended):
    call = CALLS[name]
    said = read(name, opening, f"{mark}plan {call} more</think>answer", ended=ended)
    assert (said.content, said.tool_calls, said.thought_open) == ("answer", (), False)
    assert said.reasoning_content == f"plan {call} more"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_behind_a_thought_is_made_once(name):
    call = CALLS[name]
    said = read(name, "<think>", f"plan {call} more</think>answer{call}")
    assert [(made.name, made.arguments, made.status) for made in said.tool_calls] == [("look", {"at": "door"}, "ok")]
    assert (said.content.strip(), said.reasoning_content) == ("answer", f"plan {call} more")


@pytest.mark.parametrize("name", CALLS)
def test_a_text_behind_a_call_is_content_as_one_before_it_is(name):
    call = CALLS[name]
    said = read(name, "<think>", f"plan</think>answer\n{call}\nI look.")
    assert (said.content.split(), said.reasoning_content) == (["answer", "I", "look."], "plan")
    assert [made.name for made in said.tool_calls] == ["look"]
    assert read(name, "", f"{call} Then.\n").content == "Then."


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("opening", ["", "<think></think>"])
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_nothing_opened_as_a_thought_is_content(name, opening, ended):
    said = read(name, opening, "answer", ended=ended)
    assert (said.content, said.reasoning_content, said.thought_open) == ("answer", None, False)
    called = read(name, opening, f"answer {CALLS[name]}", ended=ended)
    assert (called.content.strip(), called.reasoning_content) == ("answer", None)
    assert [made.name for made in called.tool_calls] == ["look"]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_thought_that_the_prompt_opened_and_nothing_closed_is_thinking(name, ended):
    said = read(name, "<think>", "plan", ended=ended)
    assert (said.content, said.reasoning_content, said.thought_open) == ("", "plan", True)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(("opening", "mark"), [("<think>", ""), ("", "<think>")])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_a_thought_that_nothing_closes_is_thinking_too(name, opening, mark, ended):
    said = read(name, opening, f"{mark}plan {CALLS[name]} more", ended=ended)
    assert (said.content, said.tool_calls, said.thought_open) == ("", (), True)
    assert said.reasoning_content == f"plan {CALLS[name]} more"


@pytest.mark.parametrize(
    ("name", "opening", "closing", "call"),
    [
        (
            "hy3",
            "<think:opensource>",
            "</think:opensource>",
            "<tool_calls:opensource>\n<tool_call:opensource>look<tool_sep:opensource>\n<arg_key:opensource>at</arg_key:opensource>"
            "\n<arg_value:opensource>door</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        ),
        ("gemma4", "<|channel>thought\n", "<channel|>", '<|tool_call>call:look{at:<|"|>door<|"|>}<tool_call|>'),
    ],
)
def test_families_with_marks_of_their_own_read_calls_in_thoughts_alike(name, opening, closing, call):
    renderer = source_renderer(name)
    prompt = renderer.decode(renderer.write_ids([ASK], None, True)).removesuffix(opening + closing)

    def read(begun, sampled):
        texts = (
            renderer.tokenizer.unescaped.encode(text, add_special_tokens=False) for text in (sampled, prompt + begun)
        )
        return renderer.parse_response(*(np.array(ids, dtype=np.int32) for ids in texts), [LOOK])

    for begun, mark in ((opening, ""), ("", opening)):
        said = read(begun, f"{mark}plan {call}{closing}answer {call}")
        assert (said.content.strip(), [made.status for made in said.tool_calls]) == ("answer", ["ok"])
        assert "plan" in said.reasoning_content and said.thought_open is False
    said = read("", f"{opening}plan {call} more")
    assert (said.content, said.tool_calls, said.thought_open) == ("", (), True)
    assert said.reasoning_content.endswith(f"plan {call} more")


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe"])
def test_a_call_inside_a_thought_that_nothing_closes_is_thinking_for_a_template_too(template):
    renderer = template_renderer(template)
    call = {"qwen3": HERMES, "qwen3_5_think": XML, "glm4moe": GLM}[template]
    ids = np.array(renderer.tokenizer.encode(f"<think>plan {call} more"), dtype=np.int32)
    said = renderer.parse_response(ids, None, [LOOK])
    assert (said.content, said.tool_calls, said.thought_open) == ("", (), True)
    assert said.reasoning_content == f"plan {call} more"


@pytest.mark.parametrize("name", ["glm-4.5", "glm-5", "deepseek-v4", "qwen3"])
def test_marks_of_thinking_behind_the_first_words_are_text(name):
    """There is one thought, and it comes first."""
    said = read(name, "", "answer <think>x</think> more")
    assert (said.content, said.reasoning_content) == ("answer <think>x</think> more", None)
    said = read(name, "<think>", "plan</think>answer <think>x</think>")
    assert (said.content, said.reasoning_content) == ("answer <think>x</think>", "plan")


def test_marks_of_thinking_in_an_argument_belong_to_it():
    said = read("glm-4.5", "", GLM.replace("door", "<think>a</think>b"))
    assert [made.arguments for made in said.tool_calls] == [{"at": "<think>a</think>b"}]
    assert said.reasoning_content is None


def test_a_thought_of_an_earlier_turn_does_not_open_one_in_this():
    renderer, encode = family_renderer("glm-4.5"), family_tokenizer("glm-4.5").encode
    prompt = np.array(encode("<think>a</think>b<|user|>\nc<|assistant|>"), dtype=np.int32)
    said = renderer.parse_response(np.array(encode("answer"), dtype=np.int32), prompt)
    assert (said.content, said.reasoning_content) == ("answer", None)
