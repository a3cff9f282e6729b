"""What a family renders it reads back, and renders again to the same ids."""

import numpy as np
import pytest
from families import FAMILIES, MORE, family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found

ASK = {"role": "user", "content": "How warm is it?"}
PROPERTIES = {
    "place": {"type": "string"},
    "days": {"type": "array"},
    "deep": {"type": "object"},
    "count": {"type": "integer"},
    "warm": {"type": "boolean"},
    "least": {"type": "number"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look at the sky.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("look", "look_again")
]

VALUE = st.text(st.sampled_from('aB5. \n"\\{}[]:<>é日🙂'), max_size=12)
# No format keeps the space around what is said.
TEXT = VALUE.map(str.strip)
WORDS = st.sampled_from(["5", "true", "null", "None", '{"a": 1}', "[1]", "1e3"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9**20) | VALUE,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(VALUE, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "place": WORDS | VALUE,
        "days": st.lists(JSON, max_size=3),
        "deep": st.dictionaries(VALUE, JSON, max_size=2),
        "count": st.integers(),
        "warm": st.booleans(),
        "least": st.floats(allow_nan=False, allow_infinity=False),
    },
)
SAID = TEXT.map(lambda text: f"w{text}w")
THOUGHT = st.none() | TEXT.map(lambda text: f"t{text}t")

ONE_CALL = ("gpt-oss", "llama-3")
NO_THINKING = ("qwen3-vl", "deepseek-v3", "kimi-k2", "llama-3")
# Kimi K2.5 drops the thinking of an answer even where it is the last turn.
# Llama's call is the whole of what is said. In harmony what is said before a call is part of the analysis.
CALLS_ALONE = ("gpt-oss", "llama-3")


def messages(name):
    call = st.tuples(st.sampled_from(["look", "look_again"]), ARGUMENTS)
    calls = st.lists(call, max_size=1 if name in ONE_CALL else 3)
    return st.builds(message, st.just(name), SAID | st.just(""), THOUGHT, calls)


def message(name, content, thought, calls):
    made = {"role": "assistant", "content": content}
    if calls and name in CALLS_ALONE:
        made["content"] = ""
    if not calls and not content:
        made["content"] = "w"
    if thought is not None and name not in NO_THINKING and (calls or name != "kimi-k2.5"):
        made["reasoning_content"] = thought
    if calls:
        made["tool_calls"] = [
            {
                "id": f"functions.{called}:{number}",
                "type": "function",
                "function": {"name": called, "arguments": arguments},
            }
            for number, (called, arguments) in enumerate(calls)
        ]
    return made


def without_ids(calls):
    return [call["function"] for call in calls]


@pytest.mark.parametrize("name", {**FAMILIES, **MORE})
@given(data=st.data())
@drawn("messages of families", 5, 500)
def test_a_message_comes_back_from_its_ids_and_gives_them_again(name, data):
    comes_back(family_renderer(name), data.draw(messages(name)))


def comes_back(renderer, said, read_as=lambda message: message):
    """It is read from its ids, as `read_as` makes it, and gives them again."""
    prompt = renderer.render_ids([ASK], TOOLS)
    whole = renderer.render_ids([ASK, said], TOOLS, False)
    if whole[: len(prompt)].tolist() != prompt.tolist():
        assert "reasoning_content" not in said  # the prompt opens a thought, which a message without one closes away
        return
    read = renderer.parse_response(whole[len(prompt) :], prompt, TOOLS)
    assert [call.status for call in read.tool_calls] == ["ok"] * len(said.get("tool_calls", ()))
    back = read_as(read.message())
    assert back["content"].strip() == said["content"].strip()
    assert (back.get("reasoning_content") or "").strip() == said.get("reasoning_content", "")
    assert without_ids(back.get("tool_calls", ())) == without_ids(said.get("tool_calls", ()))
    assert renderer.render_ids([ASK, back], TOOLS, False).tolist() == whole.tolist()


def test_a_reader_that_takes_an_argument_for_text_is_found():
    """The campaign can fail."""

    def as_text(message):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {key: str(value) for key, value in call["function"]["arguments"].items()}
        return message

    assert is_found(lambda said: comes_back(family_renderer("qwen3"), said, as_text), messages("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
@given(tokens=st.lists(st.integers(0, 10_000), max_size=40), with_tools=st.booleans())
@drawn("ids that families read", 5, 500)
def test_no_sampled_ids_make_a_parser_raise(name, tokens, with_tools):
    renderer, size = family_renderer(name), len(family_tokenizer(name))
    # Every other token is a special one: they have the highest ids.
    ids = np.asarray([size - 1 - t % 20 if t % 2 else t % size for t in tokens], dtype=np.int32)
    for prompt in (None, renderer.render_ids([ASK], TOOLS)):
        read = renderer.parse_response(ids, prompt, TOOLS if with_tools else None)
        assert all(call.status != "ok" or call.name for call in read.tool_calls)


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2.5"])
def test_a_call_keeps_the_id_that_its_answer_must_name(name):
    renderer = family_renderer(name)
    said = message(name, "", None, [("look", {}), ("look_again", {})])
    prompt, whole = renderer.render_ids([ASK], TOOLS), renderer.render_ids([ASK, said], TOOLS, False)
    read = renderer.parse_response(whole[len(prompt) :], prompt, TOOLS)
    assert [call.id for call in read.tool_calls] == ["functions.look:0", "functions.look_again:1"]
    assert renderer.render_ids([ASK, read.message()], TOOLS, False).tolist() == whole.tolist()


# -- arguments that are written as bare text

BARE = ["qwen3.5", "glm-5", "glm-4.5", "minimax-m2", "nemotron-3"]


def read_argument(name, key, value, text, tools):
    """What a family reads where it would write `value`, but with `text` in its place."""
    renderer, tokenizer = family_renderer(name), family_tokenizer(name)
    said = message(name, "", "t", [("look", {key: value})])
    prompt, whole = renderer.render_ids([ASK], TOOLS), renderer.render_ids([ASK, said], TOOLS, False)
    completion = tokenizer.encode(tokenizer.decode(whole[len(prompt) :]).replace(str(value), text))
    (call,) = renderer.parse_response(np.asarray(completion), prompt, tools).tool_calls
    return call.arguments[key] if call.status == "ok" else call.status


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(
    ("key", "text", "with_tools", "without"),
    [
        ("place", "Bonn", "Bonn", "Bonn"),
        ("place", "5", "5", 5),
        ("place", "true", "true", True),
        ("count", "5", 5, 5),
        ("count", "five", "invalid_json", "five"),
        ("warm", "true", True, True),
        ("warm", "perhaps", "invalid_json", "perhaps"),
        ("unheard-of", "Bonn", "Bonn", "Bonn"),
        ("unheard-of", "[1]", [1], [1]),
    ],
)
def test_bare_text_has_the_type_that_the_tool_declares(name, key, text, with_tools, without):
    assert read_argument(name, key, 77777, text, TOOLS) == with_tools
    assert read_argument(name, key, 77777, text, None) == without
