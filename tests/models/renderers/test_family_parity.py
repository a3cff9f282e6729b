"""Each family writes what the published chat template writes, or the prompt that is written down here."""

import json

import jinja2
import pytest
from dialogues import ANSWER, ASK, DIALOGUES, SYSTEM, THOUGHT, TOOLS
from families import FAMILIES, MORE, TEMPLATES, family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from verbatim.core.errors import EnvironmentFault


def with_text_arguments(message):
    calls = [
        {**call, "function": {**(f := call["function"]), "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
        if isinstance(call["function"]["arguments"], dict)
    ]
    return {**message, "tool_calls": calls} if calls else message


def with_thinking(message):
    return {**message, "thinking": message["reasoning_content"]} if "reasoning_content" in message else message


# Which of a message's fields a template reads.
READS = {"deepseek-v3": with_text_arguments, "gpt-oss": with_thinking}


def template_ids(name, messages, tools, generation):
    try:
        return family_tokenizer(name).apply_chat_template(
            [READS.get(name, dict)(message) for message in messages],
            tools=tools,
            add_generation_prompt=generation,
            return_dict=False,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None


def calls_of(messages):
    return [len(message["tool_calls"]) for message in messages if message.get("tool_calls")]


def arguments_as_text(messages):
    return any(isinstance(c["function"]["arguments"], str) for m in messages for c in m.get("tool_calls", ()))


def system_in_between(messages):
    return any(message["role"] == "system" for message in messages[1:])


# Where a family of the package writes something else than the template, and when.
DIFFERENT = {
    # No line break between two calls.
    "glm-4.5": lambda messages: any(n > 1 for n in calls_of(messages)),
    # No line break between two calls; later calls under the header that the template forgets to write; a later system
    # message in its place.
    "deepseek-v3": lambda messages: sum(calls_of(messages)) > 1 or system_in_between(messages),
    # Refused by the family.
    "nemotron-3": system_in_between,
    "nemotron-3-ultra": system_in_between,
    # Refused by the renderer: the template would drop the second call; JSON text is not quoted a second time.
    "gpt-oss": lambda messages: any(n > 1 for n in calls_of(messages)) or arguments_as_text(messages),
    # JSON text is not quoted a second time.
    "llama-3": arguments_as_text,
}

WITH_TEMPLATE = [name for name, family in {**FAMILIES, **MORE}.items() if family.template]


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_ids_are_those_of_the_published_chat_template(name):
    compared = 0
    for messages, tools in DIALOGUES:
        for generation in (True, False):
            theirs = template_ids(name, messages, tools, generation)
            if theirs is None or (name in DIFFERENT and DIFFERENT[name](messages)):
                continue
            # Also where a part is left out: `render_ids` folds or refuses it.
            assert family_renderer(name).write_ids(messages, tools, generation).tolist() == theirs
            compared += 1
    assert compared >= 34  # of 56


TEXT = st.text(st.sampled_from('a. \n<>/|"\\{}é日🙂'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
SAID = st.builds(
    lambda content, extra: {"role": "assistant", "content": content, **extra},
    TEXT,
    st.fixed_dictionaries({}, optional={"reasoning_content": TEXT}),
)
CALLED = st.builds(
    lambda said, arguments: {
        **said,
        "tool_calls": [
            {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": arguments}}
        ],
    },
    SAID,
    st.dictionaries(st.sampled_from(["place", "é"]), JSON),
)
ROUND = st.builds(
    lambda ask, calls, answers, said: [
        {"role": "user", "content": ask},
        *(
            m
            for call, text in zip(calls, answers, strict=False)
            for m in (call, {"role": "tool", "content": text, "tool_call_id": "functions.look:0", "name": "look"})
        ),
        said,
    ],
    TEXT,
    st.lists(CALLED, max_size=2),
    st.lists(TEXT, max_size=2),
    SAID,
)


@pytest.mark.parametrize("name", [name for name in WITH_TEMPLATE if name != "deepseek-v3"])
@given(rounds=st.lists(ROUND, min_size=1, max_size=3), system=st.none() | TEXT, last=TEXT, tools=st.booleans())
@drawn("dialogues of families and their templates", 5, 500)
def test_any_dialogue_has_the_ids_of_the_published_chat_template(name, rounds, system, last, tools):
    has_the_ids_of_the_template(name, rounds, system, last, tools)


def has_the_ids_of_the_template(name, rounds, system, last, tools, change=lambda messages: messages):
    """Of what is said, as `change` makes it."""
    messages = [message for one in rounds for message in one]
    for dialogue, generation in ((messages, False), ([*messages, {"role": "user", "content": last}], True)):
        given = dialogue if system is None else [{"role": "system", "content": system}, *dialogue]
        theirs = template_ids(name, given, TOOLS if tools else None, generation)
        if theirs is not None:  # gpt-oss: a text before a call beside its analysis
            ours = family_renderer(name).write_ids(change(given), TOOLS if tools else None, generation)
            assert ours.tolist() == theirs


def test_white_space_that_is_taken_off_is_found():
    """The campaign can fail."""

    def stripped(messages):
        return [{**message, "content": message["content"].strip()} for message in messages]

    def case(rounds, last):
        has_the_ids_of_the_template("qwen3-vl", rounds, None, last, False, stripped)

    assert is_found(case, st.lists(ROUND, min_size=1, max_size=3), TEXT)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_that_is_listed_is_there(name):
    def ours(messages, tools):
        try:
            return family_renderer(name).render_ids(messages, tools).tolist()
        except EnvironmentFault:
            return "refused"

    assert any(
        ours(messages, tools) != theirs
        for messages, tools in DIALOGUES
        if DIFFERENT[name](messages) and (theirs := template_ids(name, messages, tools, True)) is not None
    )


# -- families without a published template at hand: data/golden/README.md

GOLDEN = ("glm-5", "minimax-m2", "kimi-k2", "kimi-k2.5")
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Bonn.",
    "tool_calls": [
        {
            "id": "functions.look:0",
            "type": "function",
            "function": {"name": "look", "arguments": {"place": "Köln", "days": [1]}},
        }
    ],
}
SEES = {"role": "tool", "content": "20 °C", "tool_call_id": "functions.look:0", "name": "look"}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_ids_are_those_that_were_written_down(name):
    renderer, golden = family_renderer(name), TEMPLATES.parent / "golden"
    for about, ids in (
        ("tools", renderer.render_ids([SYSTEM, ASK, CALL, SEES], TOOLS)),
        ("thoughts", renderer.render_ids([ASK, THOUGHT, ASK, ANSWER])),
    ):
        text = (golden / f"{name}-{about}.txt").read_text(encoding="utf-8")
        assert ids.tolist() == family_tokenizer(name).encode(text)


def test_every_promised_family_is_compared_with_something():
    assert set(FAMILIES) <= {*WITH_TEMPLATE, *GOLDEN}
