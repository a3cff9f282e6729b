"""Text stays text in every family: no field of a message or of a tool can add a special token, or take one away."""

from collections import Counter

import numpy as np
import pytest
from families import FAMILIES, MORE, family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from campaigns import Campaign, sized
from drawn import drawn, is_found
from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers.detect_family import check_escaping
from verbatim.models.renderers.special_token_escaping import BREAK, ESCAPE, EscapingTokenizer
from verbatim.models.renderers.template import TemplateRenderer

FIELDS = ("system", "user", "said", "thought", "function", "parameter", "key", "value", "deep", "call id", "answer",
          "tool", "description", "choice")  # fmt: skip


def dialogue(words):
    """Every field that text can be in."""
    arguments = {words["key"]: words["value"], "deep": [{"a": [words["deep"]]}]}
    call = {"id": words["call id"], "type": "function", "function": {"name": words["function"], "arguments": arguments}}
    schema = {
        "type": "object",
        "required": [words["parameter"]],
        "properties": {
            words["parameter"]: {"type": "string", "description": words["description"], "enum": [words["choice"]]}
        },
    }
    function = {"name": words["function"], "description": words["description"], "parameters": schema}
    messages = [
        {"role": "system", "content": words["system"]},
        {"role": "user", "content": words["user"]},
        {"role": "assistant", "content": words["said"], "reasoning_content": words["thought"], "tool_calls": [call]},
        {"role": "tool", "content": words["answer"], "tool_call_id": words["call id"], "name": words["tool"]},
    ]
    return messages, [{"type": "function", "function": function}]


def specials(name, ids):
    tokens = set(family_tokenizer(name).get_added_vocab().values())
    return Counter(int(i) for i in ids if int(i) in tokens)


HARMLESS = dict.fromkeys(FIELDS, "w")
RENDERERS = {
    **{name: lambda name=name: family_renderer(name) for name in FAMILIES},
    **{
        f"template of {name}": lambda name=name: TemplateRenderer(family_tokenizer(name))
        for name in ("qwen3", "glm-4.5", "nemotron-3", "qwen3.5")
    },
}


FORMS = ("x{}y", "w{}", "{}w")


def short(tokens):
    """Each token in each form, in all fields at once; each token and each field alone, with one of the others."""
    together = [(FIELDS, form.format(token)) for token in tokens for form in FORMS]
    return together + [
        ((FIELDS[n % len(FIELDS)],), FORMS[n % len(FORMS)].format(tokens[n % len(tokens)]))
        for n in range(max(len(FIELDS), len(tokens)))
    ]


def every(tokens):
    """Each token in each form in each field."""
    return [((field,), form.format(token)) for field in FIELDS for token in tokens for form in FORMS]


def let_through(name, renderer, row):
    """Which fields with which text change the special tokens, also where a tool has a name that could not be called."""
    plain, wrong = specials(name, renderer.write_ids(*dialogue(HARMLESS), True)), []
    for fields, text in sized(short, every)(sorted(family_tokenizer(name).get_added_vocab())):
        words = {**HARMLESS, **dict.fromkeys(fields, text)}
        changed = specials(name, renderer.write_ids(*dialogue(words), True)) != plain
        row.add(wrong=changed)
        if changed:
            wrong.append((fields, text))
    return wrong


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("which", RENDERERS)
def test_no_special_token_comes_from_a_field(which, campaign):
    name, renderer = which.rpartition(" ")[2], RENDERERS[which]()
    assert let_through(name, renderer, campaign("special tokens in fields")) == []


def hostile(name):
    tokens = list(family_tokenizer(name).get_added_vocab())
    halves = [half for token in tokens for half in (token[: len(token) // 2], token[len(token) // 2 :])]
    parts = st.sampled_from([*tokens, *halves, "<", "|", ">", ESCAPE, BREAK, "\n", " ", "é", "🙂", '"', "\\", "{", "]"])
    # A letter at both ends: empty and blank text have shapes of their own.
    return st.lists(parts, max_size=6).map(lambda found: "w" + "".join(found) + "w")


@pytest.mark.parametrize("name", {**FAMILIES, **MORE})
@given(data=st.data())
@drawn("special tokens of prompts", 5, 500)
def test_no_text_changes_the_special_tokens_of_a_prompt(name, data):
    words = {field: data.draw(hostile(name), label=field) for field in FIELDS}
    renderer = family_renderer(name)
    # Also where a part is left out: Llama 3 writes no text beside a call.
    assert specials(name, renderer.write_ids(*dialogue(words), True)) == specials(
        name, renderer.write_ids(*dialogue(HARMLESS), True)
    )


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@drawn("special tokens of bridges", 5, 500)
def test_no_text_changes_the_special_tokens_of_a_bridge(name, data):
    renderer, tokenizer = family_renderer(name), family_tokenizer(name)
    (_, ask, call, tool), tools = dialogue(HARMLESS)
    prompt = renderer.render_ids([ask], tools)
    whole = renderer.render_ids([ask, {**call, "content": ""}, tool], tools)
    assert whole[: len(prompt)].tolist() == prompt.tolist()
    rest = whole[len(prompt) :].tolist()
    close = next(i for i, token in enumerate(rest) if token in renderer.stop_token_ids)
    completion = whole[len(prompt) : len(prompt) + close + 1]
    answer, called = data.draw(hostile(name)), data.draw(hostile(name))
    bridges = [
        renderer.bridge_to_next_turn(prompt, completion, [{**tool, "content": text, "name": by}], tools)
        for text, by in (("w", "w"), (answer, called))
    ]
    assert specials(name, bridges[1]) == specials(name, bridges[0]) == specials(name, whole)
    assert answer in tokenizer.decode(bridges[1]) or name == "gpt-oss"  # there it is quoted


class Careless:
    """Encodes what tools answer past the escaping."""

    name = "careless"

    def __init__(self):
        self.tokenizer = EscapingTokenizer(family_tokenizer("glm-5"))

    def write_ids(self, messages, tools, add_generation_prompt):
        answers = "".join(message["content"] for message in messages if message["role"] == "tool")
        return np.asarray([*family_renderer("glm-5").write_ids(messages, tools, True), *self.tokenizer.encode(answers)])

    render_ids = write_ids


def test_a_renderer_that_encodes_past_the_guard_is_refused():
    renderer = Careless()
    with pytest.raises(ModelError, match='"careless" lets the text of users and tools become control tokens'):
        check_escaping(renderer, renderer.tokenizer)


def test_a_renderer_that_encodes_past_the_guard_is_found():
    """The campaigns can fail."""
    renderer, row = Careless(), Campaign("planted")
    wrong = {fields for fields, _ in let_through("glm-5", renderer, row)}
    assert wrong == {FIELDS, ("answer",)} and row.wrong

    def keeps(words):
        assert specials("glm-5", renderer.write_ids(*dialogue(words), True)) == specials(
            "glm-5", renderer.write_ids(*dialogue(HARMLESS), True)
        )

    assert is_found(keeps, st.fixed_dictionaries({field: hostile("glm-5") for field in FIELDS}))


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/sky.png"}}


@pytest.mark.parametrize("name", [*FAMILIES, "template"])
@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE]}, r"message 1 \(user\).*image_url"),
        ({"role": "tool", "content": [{"type": "input_audio", "input_audio": {}}]}, r"message 1 \(tool\).*input_audio"),
        ({"role": "user", "content": [{"type": "text", "text": "only text"}]}, "a list of parts"),
        ({"role": "user", "content": {"type": "image"}}, "content of type dict"),
        ({"role": "user", "content": "Look!", "images": ["sky.png"]}, "holds images"),
    ],
)
def test_an_attachment_is_refused_and_its_message_named(name, message, says):
    renderer = family_renderer(name) if name != "template" else RENDERERS["template of qwen3"]()
    asked = {"role": "user", "content": "x"}
    with pytest.raises(EnvironmentFault, match=f'{says}.*text only today: give "content" as one string'):
        renderer.render_ids([asked, message])
