"""A family's bridge is the turn as it was sampled, and what the family writes behind a turn."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from bridge_oracle import behind, wrong
from families import FAMILIES, MORE, family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from campaigns import Campaign, sized
from drawn import drawn
from verbatim.models.renderers import BreakReason, Conversation


def ids(values):
    return np.asarray(values, dtype=np.int32)


def call(number=0, **arguments):
    return {"id": f"functions.look:{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def sees(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"functions.look:{number}", "name": "look"}


def thoughtful(message):
    return {**message, "reasoning_content": "Think."}


ASK = {"role": "user", "content": "How warm is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "About 20."}
CALL = {"role": "assistant", "content": "", "tool_calls": [call(place="Bonn")]}
TALK = {**CALL, "content": "Let me see."}
CALLS = {**CALL, "tool_calls": [call(place="Bonn"), call(1, place="Rom", days=[1, {"a": None}])]}
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

HISTORIES = {
    "a question": [ASK],
    "a system message": [SYSTEM, ASK],
    "after a tool": [ASK, CALL, sees("20 C")],
    "after thinking and a tool": [ASK, thoughtful(CALL), sees("20 C")],
    "a second question": [ASK, ANSWER, ASK],
    "a second question after thinking": [ASK, thoughtful(ANSWER), ASK],
}
TURNS = {"answer": ANSWER, "call": CALL, "talk": TALK, "calls": CALLS}
NEXT = {
    "answer": {"user": [ASK], "two users": [ASK, ASK]},
    "call": {"tool": [sees("20 C\n")], "tool and user": [sees("20 C"), ASK]},
    "talk": {"tool": [sees("")]},
    "calls": {"tools": [sees("20 C"), sees("é", 1)]},
}
CASES = [(h, t, n) for h, t in product(HISTORIES, TURNS) for n in NEXT[t]]

# The token that the model closes its turn with, where the template leaves it to the next message to write it.
CLOSES = {"tool": "<|observation|>", "user": "<|user|>"}


def render(name, messages, generation=True):
    return family_renderer(name).render_ids(messages, TOOLS, generation).tolist()


def written(name, messages, generation=True):
    """As the family writes it, even where it leaves out a part (Llama 3: a text beside a call)."""
    return family_renderer(name).write_ids(messages, TOOLS, generation).tolist()


def sampled(name, history, turn, new, as_last=False):
    """What the model samples to say `turn`: as the template writes it in the history, or as it writes a last turn."""
    prompt = render(name, history)
    stops = family_renderer(name).stop_token_ids
    whole = written(name, [*history, turn], False) if as_last else written(name, [*history, turn, *new])
    if whole[: len(prompt)] != prompt:
        return prompt, None
    rest = whole[len(prompt) :]
    end = next((i for i, token in enumerate(rest) if token in stops), None)
    if end is not None:
        return prompt, rest[: end + 1]
    close = family_tokenizer(name).convert_tokens_to_ids(CLOSES[new[0]["role"]])
    return prompt, [*rest, close] if close in stops else None


def other_bridges(name, row, spoil=lambda found: found):
    """How many bridges there are, and those that are not what the family writes; `spoil` changes each."""
    ways, bridged, wrongs = list(product((None, "Think.", ""), (False, True))), 0, []
    renderer = family_renderer(name)
    for number, (history, turn, new) in enumerate(CASES):
        if turn == "calls" and name in ("gpt-oss", "llama-3"):
            continue  # one call per message
        for thought, as_last in sized([ways[number % len(ways)]], ways):
            messages, message, after = HISTORIES[history], TURNS[turn], NEXT[turn][new]
            said = message if thought is None else {**message, "reasoning_content": thought}
            prompt, completion = sampled(name, messages, said, after, as_last)
            if completion is None:
                continue  # what is written does not begin with the prompt
            conversation = Conversation.open(renderer, messages, TOOLS)
            conversation = conversation.answered(ids(completion), None, message)
            found = conversation.bridged(after, TOOLS)
            if isinstance(found, BreakReason):
                continue
            assert found.prompt_ids.dtype == np.int32
            calls = [(c["function"]["name"], c["id"]) for c in message.get("tool_calls", ())]
            expected = behind(renderer, messages, TOOLS, after, calls)
            fault = wrong(renderer, ids(prompt), ids(completion), spoil(found.prompt_ids), expected)
            row.add(wrong=fault is not None)
            wrongs += [(history, turn, new, thought, as_last, fault)] if fault else []
            bridged += 1
    return bridged, wrongs


@pytest.mark.campaign
@pytest.mark.parametrize("name", {**FAMILIES, **MORE})
def test_a_bridge_goes_on_with_what_the_family_writes_behind_a_turn(name, campaign):
    """Each history, turn and answer; with all tests, of each one of the six ways in which the turn may be sampled."""
    bridged, wrong = other_bridges(name, campaign("bridges of families"))
    assert wrong == [] and bridged >= sized(3, 12)


def test_a_bridge_without_its_last_token_is_found():
    """The campaign can fail."""
    bridged, wrong = other_bridges("qwen3", Campaign("planted"), spoil=lambda found: found[:-1])
    assert len(wrong) == bridged > 0


@pytest.mark.parametrize("name", ["glm-5", "glm-4.5"])
def test_a_turn_closed_by_another_token_than_the_next_message_begins_with_is_not_bridged(name):
    prompt, completion = sampled(name, [ASK], thoughtful(CALL), [sees("20 C")])
    assert family_renderer(name).bridge_to_next_turn(ids(prompt), ids(completion), [sees("20 C")], TOOLS) is not None
    for close in ("<|user|>", "<|endoftext|>"):
        other = [*completion[:-1], family_tokenizer(name).convert_tokens_to_ids(close)]
        assert family_renderer(name).bridge_to_next_turn(ids(prompt), ids(other), [sees("20 C")], TOOLS) is None


@pytest.mark.parametrize("name", {**FAMILIES, **MORE})
def test_a_system_message_in_between_is_bridged_only_as_a_users(name):
    prompt, completion = sampled(name, [ASK], thoughtful(ANSWER), [ASK], as_last=True)
    bridge = partial(family_renderer(name).bridge_to_next_turn, ids(prompt), ids(completion))
    found, said_by_user = bridge([SYSTEM], TOOLS), bridge([{**SYSTEM, "role": "user"}], TOOLS)
    if name in ("qwen3-vl", "qwen3.5", "minimax-m2", "nemotron-3", "gpt-oss", "qwen3.6", "qwen3.8", "nemotron-3-ultra"):
        assert np.array_equal(found, said_by_user)  # they write none there
    else:
        assert found is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "kimi-k2.5", "deepseek-v3"])
def test_a_call_that_cannot_be_read_stays_in_the_history(name):
    prompt, completion = sampled(name, [ASK], thoughtful(CALL), [sees("20 C")])
    tokenizer = family_tokenizer(name)
    cut = tokenizer.encode(tokenizer.decode(completion).replace("look", "", 1).replace("Bonn", "{{"))
    found = family_renderer(name).bridge_to_next_turn(ids(prompt), ids(cut), [sees("20 C")], TOOLS)
    assert found is not None
    assert found[: len(prompt) + len(cut)].tolist() == [*prompt, *cut]


@pytest.mark.parametrize("name", FAMILIES)
@given(
    completion=st.lists(st.integers(0, 290), max_size=10),
    new=st.lists(st.sampled_from(["user", "tool", "system", "assistant"]), min_size=1, max_size=3),
)
@drawn("bridges of families: any ids", 5, 500)
def test_a_bridge_starts_with_the_exact_ids_or_is_refused(name, completion, new):
    prompt = render(name, [ASK])
    completion = [i for i in completion if i < len(family_tokenizer(name))]
    messages = [{"role": role, "content": "x"} for role in new]
    found = family_renderer(name).bridge_to_next_turn(ids(prompt), ids(completion), messages, TOOLS)
    if found is not None:
        assert found[: len(prompt) + len(completion)].tolist() == [*prompt, *completion]
        assert len(found) > len(prompt) + len(completion)
