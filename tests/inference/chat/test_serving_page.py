"""The page on chat protocols names every field of every protocol where the code has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verbatim.inference.chat import anthropic_messages, openai_chat, openai_responses
from verbatim.inference.chat.protocol import UNENFORCEABLE

PAGE = (Path(__file__).parents[3] / "docs" / "inference.md").read_text(encoding="utf-8")
TITLES = {
    "### OpenAI's chat completions": openai_chat,
    "### OpenAI's Responses": openai_responses,
    "### Anthropic's Messages": anthropic_messages,
}


@pytest.mark.parametrize("title", TITLES)
def test_the_page_says_what_becomes_of_each_field(title):
    section = PAGE.partition(f"{title}\n")[2].partition("\n#")[0]
    rows = dict(re.findall(r"^\| ([a-z, ]+) \| (`.*) \|$", section, re.MULTILINE))
    said = {row: set(re.findall(r"`(\w+)`", fields)) for row, fields in rows.items()}
    fields = TITLES[title].FIELDS
    assert said == {
        "honoured": set(fields.honoured),
        "accepted, without effect": set(fields.without_effect),
        "accepted where they ask for nothing": {name for name, values in fields.neutral.items() if values},
        "refused": {name for name, values in fields.neutral.items() if not values},
    }


def test_the_page_names_the_fields_that_a_server_may_let_pass():
    paragraph = PAGE.partition("`--accept FIELD`")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) >= UNENFORCEABLE


@pytest.mark.parametrize("name", sorted(UNENFORCEABLE))
def test_what_a_server_may_let_pass_is_refused_otherwise(name):
    known = {
        "tool_choice",
        "tool_grammar",
        "thinking",
        "other_tools",
        "name",
    }  # refused by their values, or by the format
    for module in TITLES.values():
        known |= {module.FIELDS.aliases.get(field, field) for field in module.FIELDS.neutral}
    assert name in known
