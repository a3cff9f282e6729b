"""Formats that write the ids of calls get ids of their own form, and answers that name the same calls."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from families import FAMILIES, MORE, family_renderer, family_tokenizer

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import ToolCall
from verbatim.environments.calculator import Calculator
from verbatim.environments.guess_number import GuessNumber
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.call_ids import CallIds
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.rollouts.demonstrations import trajectory_from_messages

KIMI = ["kimi-k2", "kimi-k2.5"]
ASK = {"role": "user", "content": "Play."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "It acts.",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
        },
    }
    for name in ("guess", "look")
]

MISTRAL = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.tool_calls %}
    {{- '[TOOL_CALLS][' }}
    {%- for call in message.tool_calls %}
      {%- if call.id is not defined or call.id | length != 9 or '_' in call.id %}
        {{- raise_exception('IDs have nine letters and digits') }}
      {%- endif %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + ', "id": "' }}
      {{- call.id + '"}' }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- ']' + eos_token }}
  {%- elif message.role == 'tool' %}
    {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 or '_' in message.tool_call_id %}
      {{- raise_exception('IDs have nine letters and digits') }}
    {%- endif %}
    {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
    {{- '"}[/TOOL_RESULTS]' }}
  {%- else %}{{ message.content + eos_token }}
  {%- endif %}
{%- endfor %}"""
"""What Mistral's templates do with ids."""


MISTRAL_BY_ARGS = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
  {%- else %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {%- if call.id is not defined or call.id is not string or call.id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
      {%- endif %}
      {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
    {{- eos_token }}
  {%- endif %}
{%- endfor %}"""
"""What the templates of Mistral Small 3.2 and later do with calls."""


def called(*calls, content=""):
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def answer(call_id, content, **fields):
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def mistral(template=MISTRAL):
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=family_tokenizer("llama-3").backend_tokenizer,
        eos_token="</s>",
        bos_token="<s>",
        chat_template=template,
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in (
                "[INST]",
                "[/INST]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
                "[TOOL_CALLS]",
                "[TOOL_RESULTS]",
                "[/TOOL_RESULTS]",
                "[CALL_ID]",
                "[ARGS]",
                "[TOOL_CONTENT]",
            )
        ]
    )
    return create_renderer("template", tokenizer)


@pytest.mark.parametrize("name", {**FAMILIES, **MORE})
def test_the_form_of_ids_is_found_by_rendering(name):
    """Ids that nothing writes change no prompt; Kimi's name the tool."""
    renderer = family_renderer(name)
    one, other = (
        renderer.decode(renderer.render_ids([ASK, called((given, "look", {})), answer(given, "dark")], TOOLS))
        for given in ("call_0", "toolu_7")
    )
    assert one == other and ("functions.look:0" in one) == (name in KIMI)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "glm-5", "minimax-m2", "nemotron-3", "deepseek-v3"])
def test_where_no_ids_are_written_answers_stand_in_the_order_of_the_calls(name):
    """A model takes the first answer for that to its first call."""
    renderer = family_renderer(name)
    two = called(("a", "look", {}), ("b", "guess", {}), ("c", "look", {"at": 1}))
    given = [answer("c", "ccc"), answer("zz", "zzz"), answer("a", "aaa"), answer("b", "bbb")]
    text = renderer.decode(renderer.render_ids([ASK, two, *given, ASK], TOOLS))
    assert re.findall("aaa|bbb|ccc|zzz", text) == ["aaa", "zzz", "bbb", "ccc"]
    ids = [given[0]["tool_call_id"], given[2]["tool_call_id"]]
    conversation = Conversation.open(renderer, [ASK], TOOLS)
    calls = tuple(ToolCall(name="look", arguments={}, id=call_id) for call_id in reversed(ids))
    sampled = np.array([*renderer.tokenizer.encode("hm"), renderer.stop_token_ids[0]], dtype=np.int32)
    turn = called(("a", "look", {}), ("c", "look", {}))
    conversation = conversation.answered(sampled, ParsedResponse(content="", tool_calls=calls), turn)
    following = conversation.continued([given[0], given[2]], TOOLS)
    assert re.findall("aaa|ccc", renderer.decode(following.prompt_ids)) == ["aaa", "ccc"]
    assert [message.get("content") for message in following.messages[-2:]] == ["ccc", "aaa"]  # as they were given


@pytest.mark.parametrize("name", KIMI)
def test_demonstrations_with_other_ids_are_learned_as_the_model_samples_them(name):
    renderer = family_renderer(name)
    messages = [
        ASK,
        called(("call_0", "guess", {"at": 1}), ("call_1", "look", {})),
        answer("call_1", "dark", name="look"),
        answer("call_0", "no", name="guess"),
        called(("call_0", "look", {"at": 2})),
        answer("call_0", "light"),
        {"role": "assistant", "content": "Done."},
    ]
    made = trajectory_from_messages(renderer, messages, TOOLS)
    first, second, third = made.turns
    assert second.extends(first) and third.extends(second)
    written = renderer.decode([*third.prompt_ids, *third.completion_ids])
    begin, args, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    calls = [
        "functions.guess:0" + args + '{"at": 1}',
        "functions.look:1" + args + "{}",
        "functions.look:2" + args + '{"at": 2}',
    ]
    assert [part.partition(end)[0] for part in written.split(begin)[1:]] == calls
    returns = [part.partition("<|im_end|>")[0] for part in written.split("## Return of ")[1:]]
    assert returns == ["functions.look:1\ndark", "functions.guess:0\nno", "functions.look:2\nlight"]
    assert "call_" not in written.replace("tool_call_", "").replace("_call_section", "")


def test_ids_of_the_formats_form_stay_and_no_other_call_gets_them():
    messages = [
        ASK,
        called(("functions.look:1", "look", {}), ("x", "look", {})),
        answer("functions.look:1", "a"),
        answer("x", "b"),
        called(("guess:7", "guess", {}), ("functions.guess:9", "look", {})),
    ]
    changed = CallIds("named").rewritten(messages)
    assert [call["id"] for call in changed[1]["tool_calls"]] == ["functions.look:1", "functions.look:2"]
    assert [message["tool_call_id"] for message in changed[2:4]] == ["functions.look:1", "functions.look:2"]
    # The second one's id would be read as another tool's.
    assert [call["id"] for call in changed[4]["tool_calls"]] == ["guess:7", "functions.look:3"]
    assert messages[1]["tool_calls"][1]["id"] == "x"  # what was given is not changed


@pytest.mark.parametrize("name", KIMI)
def test_an_answer_that_names_no_call_is_bound_where_one_is_left_and_refused_where_several_are(name):
    renderer = family_renderer(name)
    two = called(("a", "look", {}), ("b", "guess", {}))
    bound = CallIds("named").rewritten([ASK, two, answer("zz", "x"), answer("a", "y")])
    assert [message["tool_call_id"] for message in bound[2:]] == ["functions.guess:1", "functions.look:0"]
    with pytest.raises(EnvironmentFault, match=r"message 2 has tool_call_id = 'zz', which is not .* one of a, b"):
        renderer.render_ids([ASK, two, answer("zz", "x")], TOOLS)
    with pytest.raises(EnvironmentFault, match="message 1 has tool_call_id = 'zz', but no earlier turn makes"):
        renderer.render_ids([ASK, answer("zz", "x")], TOOLS)


def test_the_answer_to_a_call_that_could_not_be_read_names_its_tool():
    """The message holds only the calls that could be read."""
    one = called(("a", "look", {}))
    changed = CallIds("named").rewritten([ASK, one, answer("a", "x"), answer("call_4", "Error: ...", name="guess")])
    assert [message["tool_call_id"] for message in changed[2:]] == ["functions.look:0", "functions.guess:1"]


@pytest.mark.parametrize("sampled", ["functions.guess:4", "guess:4"])
@pytest.mark.parametrize("named", ["own", "renamed"])
@pytest.mark.parametrize("name", KIMI)
def test_an_answer_behind_a_sampled_call_names_it_as_it_was_sampled(name, named, sampled):
    renderer = family_renderer(name)
    conversation = Conversation.open(renderer, [ASK], TOOLS)
    words = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{sampled}<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    words = ("</think>" if name == "kimi-k2.5" else "") + words
    completion = np.array(renderer.tokenizer.encode(words), dtype=np.int32)
    conversation = conversation.answered(completion)
    (call,) = conversation.said.calls
    assert (call.id, call.name) == (sampled, "guess")
    following = conversation.continued([answer(sampled if named == "own" else "toolu_1", "no")], TOOLS)
    assert following.extends
    assert following.prompt_ids[: len(conversation.prompt_ids) + len(completion)].tolist() == [
        *conversation.prompt_ids.tolist(),
        *completion.tolist(),
    ]
    added = renderer.decode(following.prompt_ids[len(conversation.prompt_ids) + len(completion) :])
    assert added.startswith(f"<|im_system|>tool<|im_middle|>## Return of {sampled}\nno<|im_end|>")


def test_a_template_that_wants_nine_letters_and_digits_gets_them():
    renderer = mistral()
    messages = [
        ASK,
        called(("call_0", "guess", {"at": 1}), ("9Ae3bDc2F", "look", {})),
        answer("9Ae3bDc2F", "dark"),
        answer("call_0", "no"),
        {"role": "assistant", "content": "Done."},
    ]
    made = trajectory_from_messages(renderer, messages, TOOLS)
    assert made.turns[1].extends(made.turns[0])
    written = renderer.decode([*made.turns[1].prompt_ids])
    assert json.loads(written.partition("[TOOL_CALLS]")[2].partition("</s>")[0]) == [
        {"name": "guess", "arguments": {"at": 1}, "id": "call00000"},
        {"name": "look", "arguments": {}, "id": "9Ae3bDc2F"},
    ]
    results = [json.loads(part.partition("[/TOOL_RESULTS]")[0]) for part in written.split("[TOOL_RESULTS]")[1:]]
    assert results == [{"content": "dark", "call_id": "9Ae3bDc2F"}, {"content": "no", "call_id": "call00000"}]


@pytest.mark.parametrize("num_before", [1, 21])
@pytest.mark.parametrize(("sampled", "wanted"), [(', "id": "9Ae3bDc2F"', "9Ae3bDc2F"), ("", "call00000")])
def test_the_id_that_was_sampled_for_such_a_template_is_the_one_that_is_answered(sampled, wanted, num_before):
    renderer = mistral()
    before = [ASK, *[{"role": "assistant", "content": "So."}, ASK] * (num_before // 2)]
    conversation = Conversation.open(renderer, before, TOOLS)
    words = f'[TOOL_CALLS][{{"name": "look", "arguments": {{}}{sampled}}}]</s>'
    completion = np.array(renderer.tokenizer.encode(words), dtype=np.int32)
    conversation = conversation.answered(completion)
    following = conversation.continued([answer("toolu_1", "dark")], TOOLS)
    assert following.extends
    added = renderer.decode(following.prompt_ids[len(conversation.prompt_ids) + len(completion) :])
    assert added == f'[TOOL_RESULTS]{{"content": "dark", "call_id": "{wanted}"}}[/TOOL_RESULTS]'


def read(renderer, text):
    return renderer.parse_response(np.array(renderer.tokenizer.encode(text), dtype=np.int32), None, TOOLS)


def test_calls_with_their_ids_between_name_and_arguments_are_read():
    renderer = mistral(MISTRAL_BY_ARGS)
    said = read(renderer, 'So.[TOOL_CALLS]look[CALL_ID]9Ae3bDc2F[ARGS]{"at": 1}[TOOL_CALLS]guess[CALL_ID]b[ARGS]{}</s>')
    assert said.content == "So."
    assert [(call.name, call.id, call.arguments, call.status) for call in said.tool_calls] == [
        ("look", "9Ae3bDc2F", {"at": 1}, "ok"),
        ("guess", "", {}, "ok"),
    ]


@pytest.mark.parametrize(
    ("call", "status"),
    [
        ('look[ARGS]{"at": 1}', "invalid_json"),
        ('look[CALL_ID]9Ae3bDc2F{"at": 1}', "invalid_json"),
        ('look[CALL_ID][ARGS]{"at": 1}', "malformed_structure"),
        ('look[CALL_ID]a b[ARGS]{"at": 1}', "malformed_structure"),
        ('look[CALL_ID]9Ae3bDc2F[ARGS]{"at": 1} x', "invalid_json"),
        ('[CALL_ID]9Ae3bDc2F[ARGS]{"at": 1}', "missing_name"),
        ('look[CALL_ID]9Ae3bDc2F[ARGS]{"at": 1, "at": 2}', "invalid_json"),
    ],
)
def test_a_call_with_its_id_that_is_more_or_less_than_its_parts_is_none(call, status):
    (found,) = read(mistral(MISTRAL_BY_ARGS), f"[TOOL_CALLS]{call}</s>").tool_calls
    assert (found.status, found.arguments, found.id) == (status, None, "")


@pytest.mark.parametrize("begun", ["look[CALL_ID]cal", "look", "look[CALL_ID]9Ae3bDc2F[ARGS]{"])
def test_a_call_that_another_one_cuts_off_lends_it_no_name_and_no_id(begun):
    said = read(mistral(MISTRAL_BY_ARGS), f"[TOOL_CALLS]{begun}[TOOL_CALLS]guess[CALL_ID]9Ae3bDc2F[ARGS]{{}}</s>")
    assert [(call.name, call.status) for call in said.tool_calls] == [(None, "invalid_json"), ("guess", "ok")]


def test_an_answer_names_the_id_that_was_sampled_between_name_and_arguments():
    renderer = mistral(MISTRAL_BY_ARGS)
    conversation = Conversation.open(renderer, [ASK], TOOLS)
    words = "[TOOL_CALLS]look[CALL_ID]9Ae3bDc2F[ARGS]{}</s>"
    completion = np.array(renderer.tokenizer.encode(words), dtype=np.int32)
    following = conversation.answered(completion).continued([answer("toolu_1", "dark")], TOOLS)
    assert following.extends
    added = renderer.decode(following.prompt_ids[len(conversation.prompt_ids) + len(completion) :])
    assert added == "[TOOL_RESULTS]9Ae3bDc2F[TOOL_CONTENT]dark[/TOOL_RESULTS]"


@pytest.mark.parametrize("environment", [GuessNumber, Calculator])
@pytest.mark.parametrize("name", KIMI)
def test_the_demonstrations_of_bundled_environments_can_be_learned(name, environment):
    for shown in environment().demonstrations(3, seed=0):
        made = trajectory_from_messages(family_renderer(name), shown.messages, shown.tools)
        assert all(after.extends(before) for before, after in itertools.pairwise(made.turns))
        assert "call_0" not in family_renderer(name).decode(made.turns[-1].prompt_ids)
