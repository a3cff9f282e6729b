"""A chat format that leaves out tools, calls or answers is refused where it is given some, never used in silence."""

import pytest
from dialogues import ANSWER, ASK, CALL, CALLS, SEES, TOOLS
from families import FAMILIES, MORE, family_tokenizer
from test_hermes import CHATML, chatml_tokenizer
from test_template_renderer import byte_tokenizer

from verbatim.core.errors import EnvironmentFault, ModelError, UsageError
from verbatim.models.renderers import create_renderer
from verbatim.rollouts import trajectory_from_messages

CALLING = CHATML.replace(
    "message['content'] +",
    "message['content'] + (message.tool_calls[0].function | tojson if message.tool_calls else '') +",
)
"""Writes calls, and shows no tools."""


def made(template):
    tokenizer = byte_tokenizer(template, eos="<|im_end|>", tokens=("<|im_start|>", "<|im_end|>"))
    return create_renderer("template", tokenizer)


@pytest.fixture(scope="module")
def toolless():
    return create_renderer("template", chatml_tokenizer())


@pytest.fixture(scope="module")
def untold():
    return made(CALLING)


def test_tools_that_the_prompt_would_not_show_are_refused(toolless):
    wanted = r'shows no tools and writes no tool calls, but the conversation has look; set tools = "hermes" under \['
    with pytest.raises(ModelError, match=wanted):
        toolless.render_ids([ASK], TOOLS)


def test_a_call_that_would_become_an_empty_turn_is_refused(toolless):
    with pytest.raises(ModelError, match=r"writes no tool calls, but"):
        toolless.render_ids([ASK, CALL, SEES])
    with pytest.raises(ModelError, match="hermes"):
        trajectory_from_messages(toolless, [ASK, CALL, SEES, ANSWER], TOOLS)


def test_a_conversation_without_tools_is_none_of_its_business(toolless):
    assert len(toolless.render_ids([ASK, ANSWER, ASK]))
    assert len(trajectory_from_messages(toolless, [ASK, ANSWER]).turns) == 1


def test_answers_that_are_dropped_are_refused():
    template = CHATML.replace("{{'<|im_start|>'", "{% if message.role != 'tool' %}{{'<|im_start|>'").replace(
        "+ '\n'}}", "+ '\n'}}{% endif %}", 1
    )
    renderer = made(template)
    with pytest.raises(ModelError, match="does not write the answers of tools"):
        renderer.render_ids([ASK, SEES])


def test_tools_may_be_described_by_the_environment_itself_where_calls_are_written(untold):
    with pytest.raises(ModelError, match=r"template shows no tools, but the conversation has look"):
        untold.render_ids([ASK], TOOLS)
    with pytest.raises(ModelError, match="shows no tools"):
        untold.render_ids([{"role": "system", "content": "Overlook nothing."}, ASK], TOOLS)
    assert len(untold.render_ids([{"role": "system", "content": "You have look(place)."}, ASK], TOOLS))


def test_schemas_that_are_only_shown_below_a_system_message_are_refused_without_one():
    template = CALLING.replace(
        "message['content'] +", "message['content'] + (tools | tojson if tools and message.role == 'system' else '') +"
    )
    renderer = made(template)
    assert len(renderer.render_ids([{"role": "system", "content": "Hi."}, ASK], TOOLS))
    with pytest.raises(ModelError, match="shows no tools without a system message"):
        renderer.render_ids([ASK], TOOLS)


def test_a_demonstrated_call_that_reads_back_as_something_else_is_refused():
    both = CALLING.replace(
        "[0].function | tojson",
        "[0].function | tojson + (message.tool_calls[1:] | string if message.tool_calls | length > 1 else '')",
    )
    with pytest.raises(UsageError, match=r"message 1 calls look, look, but .*read back"):
        trajectory_from_messages(made(both), [ASK, {**CALLS, "content": ""}])


def test_the_second_call_of_a_template_that_writes_one_is_refused(untold):
    with pytest.raises(EnvironmentFault, match=r"^messages\[1\]\.tool_calls\[1\]: the model's chat template writes "):
        trajectory_from_messages(untold, [ASK, {**CALLS, "content": ""}])


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_a_family_writes_tools_or_refuses_them(name):
    renderer = create_renderer(name, family_tokenizer(name))
    if name != "deepseek-v3":  # it writes calls and no schemas, as the published template
        text = renderer.decode(renderer.render_ids([ASK, CALL, SEES], TOOLS))
        assert all(said in text for said in ("Look at the sky.", "Bonn", "20 °C"))
        return
    with pytest.raises(ModelError, match='renderer "deepseek-v3" shows no tools, but the conversation has look'):
        renderer.render_ids([ASK], TOOLS)
