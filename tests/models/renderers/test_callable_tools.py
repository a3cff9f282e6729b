"""A tool that a format could not call is refused by its name, before a model is shown it."""

import doctest

import numpy as np
import pytest
from test_read_calls import FORMATS, renderer_of

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import callable_tools
from verbatim.models.renderers.callable_tools import CallableTools

ASK = {"role": "user", "content": "How warm is it?"}
NAMES = [
    "get weather",
    "get-weather",
    "files.read",
    "mcp__git__log",
    "look>",
    'say "hi"',
    "a=b",
    "köln",
    " look",
    "f(x)",
    "import",
]
TAKES_ANY = ("qwen3", "qwen3-vl", "qwen2_5", "qwen3_vl", "qwen3_training")
"""Of the formats that write a call as JSON."""
ENDS_AT_A_SPACE = ("qwen3.5", "glm-4.5", "nemotron-3", "minimax-m2", "deepseek-v3", "kimi-k2", "gpt-oss", "lfm2_v2")


def tool(name, *required):
    properties = {key: {"type": "string"} for key in required}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return [{"type": "function", "function": {"name": name, "description": "Look.", "parameters": parameters}}]


def is_taken(renderer, tools):
    try:
        renderer.render_ids([ASK], tools)
    except ModelError:  # the format shows no tools
        return None
    except EnvironmentFault as error:
        assert str(error).startswith("tools[0]: ")
        assert "expected a name of letters, digits and _, such as '" in str(error)
        return False
    return True


def comes_back(renderer, name, key):
    """Whether a call that the format writes is read as it was written."""
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {key: "Bonn"}}}
    said = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call]}
    try:
        prompt = renderer.write_ids([ASK], None, True)
        whole = renderer.write_ids([ASK, said], None, False)
    except EnvironmentFault:
        return False
    shorter = min(len(prompt), len(whole))
    same = next((i for i in range(shorter) if prompt[i] != whole[i]), shorter)
    found = renderer.parse_response(np.asarray(whole[same:]), prompt[:same]).tool_calls
    return [(c.status, c.name, c.arguments) for c in found] == [("ok", name, {key: "Bonn"})]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_is_taken_if_and_only_if_its_call_comes_back(name):
    renderer = renderer_of(name)
    for called in NAMES:
        taken = is_taken(renderer, tool(called))
        assert taken in (None, comes_back(renderer, called, "at")), called
    for key in ("at", "the place", "max-results", "a<b", "class"):
        taken = is_taken(renderer, tool("look", key))
        assert taken in (None, comes_back(renderer, "look", key)), key


@pytest.mark.parametrize("name", [name for name in FORMATS if name.split()[1] in (*TAKES_ANY, *ENDS_AT_A_SPACE)])
def test_a_name_with_a_space_is_taken_where_it_stands_in_json(name):
    taken = is_taken(renderer_of(name), tool("get weather"))
    assert taken in (None, name.split()[1] in TAKES_ANY)
    assert is_taken(renderer_of(name), tool("get_weather", "at")) in (None, True)


def test_the_refusal_says_what_to_call_it():
    with pytest.raises(EnvironmentFault) as refused:
        renderer_of("family qwen3.5").render_ids([ASK], [*tool("look"), *tool("get weather")])
    assert str(refused.value) == (
        "tools[1]: a call of the tool 'get weather' could not be read back as renderer \"qwen3.5\" writes it; expected "
        "a name of letters, digits and _, such as 'get_weather'"
    )
    with pytest.raises(EnvironmentFault) as refused:
        renderer_of("template lfm2_v2").render_ids([ASK], tool("look", "max-results"))
    assert str(refused.value) == (
        "tools[0]: a call of the tool 'look' with its parameter 'max-results' could not be read back as the model's "
        "chat template writes it; expected a name of letters, digits and _, such as 'max_results'"
    )


def test_what_the_module_says_of_itself():
    assert doctest.testmod(callable_tools).failed == 0


def test_a_parameter_that_is_not_required_may_have_any_name():
    (tools,) = tool("look", "max-results")
    tools["function"]["parameters"]["required"] = []
    assert is_taken(renderer_of("template lfm2_v2"), [tools])


@pytest.mark.parametrize("function", [{}, {"name": None}, {"name": "look", "parameters": {"required": "at"}}, "look"])
def test_a_schema_that_is_malformed_is_none_of_its_business(function):
    tools = CallableTools(lambda *_: np.array([1]), lambda *_: [], "it")
    tools.refuse([{"function": function}, function, None])


def test_a_name_is_written_and_read_once():
    written = []

    def write(messages, prompt):
        written.append(messages)
        return np.array([1])

    tools = CallableTools(write, lambda *_: [], "it")
    for _ in range(3):
        tools.refuse(tool("get weather"))
    assert len(written) == 4  # the call with this name, and a plain one, each with its prompt
