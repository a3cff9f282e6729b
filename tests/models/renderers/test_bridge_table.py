"""What continues and what does not, for every format: the table of benchmarks/notes/renderers.md, and its bridges.

`VERBATIM_WRITE_TABLE=1 pytest tests/models/renderers/test_bridge_table.py` writes the table into the page.
"""

import os

import pytest
from bridge_kinds import (
    BEGIN,
    END,
    KINDS,
    PAGE,
    TEMPLATES,
    faults_of,
    outcome,
    table,
    write_page,
)
from families import FAMILIES, MORE

from campaigns import sized

FORMATS = [*FAMILIES, *MORE, *TEMPLATES]
TRIED = sized([*FAMILIES, *MORE, *list(TEMPLATES)[::4]], FORMATS)


@pytest.mark.slow
def test_the_table_of_the_page_is_what_is_found():
    if os.environ.get("VERBATIM_WRITE_TABLE"):
        write_page()
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    assert shown == table()


@pytest.mark.slow
@pytest.mark.campaign
def test_each_bridge_of_the_table_is_what_the_format_writes_behind_a_turn(campaign):
    row, faults = campaign("bridges of the table"), {}
    for name in TRIED:
        num_bridges, found = faults_of(name)
        row.cases += num_bridges
        row.wrong += len(found)
        faults.update(found)
    assert faults == {}
    assert row.cases > 100


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3-vl",
        "qwen3.5",
        "glm-4.5",
        "glm-5",
        "minimax-m2",
        "kimi-k2.5",
        "nemotron-3",
        "template qwen3",
        "template qwen2_5",
        "template glm4moe",
    ],
)
def test_no_tools_answer_is_rendered_again_for_a_form(name):
    """An empty block, text beside a call, two calls, one that cannot be read, another spelling of one, a thought."""
    for kind in KINDS:
        if kind.startswith("tool"):
            assert outcome(name, kind, "tool_cycle") == "yes", kind


@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3-vl", "qwen3.5", "glm-4.5", "glm-5", "minimax-m2", "kimi-k2.5", "nemotron-3", "template qwen3"],
)
def test_at_a_users_message_only_a_thought_is_dropped_and_none_where_all_are_kept(name):
    assert outcome(name, "user: plain", "tool_cycle") == "yes"
    assert outcome(name, "user: empty block", "tool_cycle") == "yes"
    assert outcome(name, "user: thought", "tool_cycle") == "f"
    assert outcome(name, "user: thought", "all") == "yes"
