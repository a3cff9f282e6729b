"""Who speaks, the field `name` of a message, is in the prompt or is refused: it never goes without a word."""

import numpy as np
import pytest
from test_no_message_lost import QUICK, made

from verbatim.core.errors import EnvironmentFault
from verbatim.models.renderers import Conversation

WHO = "Zoroaster"
ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hallo"}
SYSTEM = {"role": "system", "content": "Be brief."}
WRITES = ("kimi-k2.5",)
"""Formats that write who the user is."""


def named(message):
    return {**message, "name": WHO}


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([named(ASK)], 0),
        ([ASK, ANSWER, named(ASK)], 2),
        ([ASK, named(ANSWER), ASK], 1),
        ([named(SYSTEM), ASK], 0),
        ([ASK, ANSWER, named(SYSTEM), ASK], 2),
        ([named({**SYSTEM, "role": "developer"}), ASK], 0),
    ],
)
def test_a_name_is_in_the_prompt_or_refused_by_its_field(name, messages, place):
    renderer = made(name)
    try:
        text = renderer.decode(renderer.render_ids(messages))
    except EnvironmentFault as error:
        assert str(error).startswith(f"messages[{place}]")  # in the name, or in a role that the format has not
        assert WHO in str(error) or name not in WRITES
        if messages[place]["role"] in ("user", "assistant"):
            assert str(error).startswith(f"messages[{place}].name: ") and WHO in str(error)
    else:
        assert WHO in text and name in WRITES


@pytest.mark.parametrize("name", QUICK)
def test_a_name_in_what_continues_a_turn_is_in_the_prompt_or_refused(name):
    renderer = made(name)
    conversation = Conversation.open(renderer, [ASK])
    sampled = np.array([*renderer.tokenizer.encode("sampled"), renderer.stop_token_ids[0]], dtype=np.int32)
    conversation = conversation.answered(sampled)
    if name in WRITES:
        assert WHO in renderer.decode(conversation.continued([named(ASK)]).prompt_ids)
        return
    with pytest.raises(
        EnvironmentFault, match=rf"^messages\[2\]\.name: .* found '{WHO}'; put the name into the message's"
    ):
        conversation.continued([named(ASK)])


@pytest.mark.parametrize("name", WRITES)
def test_a_format_that_writes_names_takes_them(name):
    text = made(name).decode(made(name).render_ids([named(ASK)]))
    assert text.count(WHO) == 1 and text.index(WHO) < text.index("Hi")


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_name_is_none(empty):
    renderer = made("qwen3")
    assert renderer.render_ids([{**ASK, "name": empty}]).tolist() == renderer.render_ids([ASK]).tolist()
