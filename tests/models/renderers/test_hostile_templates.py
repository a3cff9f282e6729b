"""Templates that look at the whole conversation in roundabout ways: a bridge is what they write, or there is none."""

from pathlib import Path

import numpy as np
import pytest
from random_dialogues import byte_tokenizer

from campaigns import sized
from verbatim.core.errors import EnvironmentFault
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.tool_support import COMPLETE

FOLDER = Path(__file__).parent / "data" / "hostile_templates"
TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM, USER, REPLY = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "u"), ("assistant", "yo"))
)
HISTORIES = [
    [USER],
    [SYSTEM, USER],
    [USER] * 2,
    [USER] * 3,
    [USER, REPLY, USER],
    [SYSTEM, USER, REPLY, USER],
    [USER, REPLY, USER, REPLY, USER],
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]


def bridges(template, spoil=lambda found: found):
    """(number made, those that are not what the template writes); `spoil` changes each."""
    renderer = create_renderer("template", byte_tokenizer(template))
    renderer.tool_support = COMPLETE  # bridges are right also where a run with tools would be refused
    completion = np.asarray(renderer.tokenizer.encode("yo<|im_end|>"), dtype=np.int32)
    tools = TOOLS if "tools" in template else None
    made, wrong = 0, []
    for history in HISTORIES:
        for new in ([USER], [SYSTEM], [USER, USER]):
            try:
                prompt = renderer.render_ids(history, tools)
                bridge = renderer.bridge_to_next_turn(prompt, completion, new, tools)
                whole = renderer.render_ids([*history, REPLY, *new], tools)
            except EnvironmentFault as error:
                assert str(error).startswith("messages[")  # a message that the template leaves out
                continue
            if bridge is not None:
                made += 1
                if spoil(bridge).tolist() != whole.tolist():
                    wrong.append([message["role"] for message in (*history, *new)])
    return made, wrong


def test_a_template_that_only_looks_at_each_message_is_bridged_every_time():
    assert bridges(PLAIN) == (len(HISTORIES) * 2, [])  # a system message starts anew


def test_a_bridge_without_its_last_token_is_found():
    """The campaign can fail."""
    made, wrong = bridges(PLAIN, spoil=lambda found: found[:-1])
    assert len(wrong) == made


SHORT = dict.fromkeys(
    ["the_loop_counted", "generator_is_used_up", "break_in_one_history_only", *sorted(TEMPLATES)[::2]]
)
"""With all tests: every second one, and three more."""


@pytest.mark.slow
@pytest.mark.campaign
def test_no_bridge_is_wrong(campaign):
    row = campaign("bridges of hostile templates")
    wrong = {name: found for name in sized(SHORT, TEMPLATES) if (found := bridges(TEMPLATES[name])[1])}
    row.cases, row.wrong = row.cases + len(sized(SHORT, TEMPLATES)), row.wrong + len(wrong)
    assert wrong == {}
