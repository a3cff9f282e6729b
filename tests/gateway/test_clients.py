"""Agents on other people's SDKs, unmodified, against the gateway with a scripted model.

They run in an environment of their own (`make test-clients`), since their packages pin each other's versions. Each is a
program in clients/; what it sampled is recorded once, and a conversation that only goes on is one training sample.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verbatim.envcheck.program_check import check_program
from verbatim.gateway.program.environment import Program

pytestmark = pytest.mark.clients
CLIENTS = Path(__file__).parent / "clients"


def check(program: str, **example: object):
    python = os.environ.get("VERBATIM_CLIENTS_PYTHON")
    assert python, "these tests need VERBATIM_CLIENTS_PYTHON, the Python of an environment with the SDKs"
    environment = Program([python, program], [{"id": "0", **example}], cwd=str(CLIENTS), sandbox=False, timeout=200.0)
    report = check_program(environment, seconds=200.0)
    assert report.error is None, report.error
    assert report.num_sampled_tokens == report.num_trained_tokens > 0
    return report


@pytest.mark.parametrize(("program", "example", "num_turns"), [
    ("anthropic_loop.py", {}, 2), ("anthropic_loop.py", {"stream": True}, 2),
    ("openai_agents_sdk.py", {"api": "responses"}, 4), ("openai_agents_sdk.py", {"api": "chat_completions"}, 4),
    ("langgraph_agent.py", {}, 4), ("langgraph_agent.py", {"stream": True}, 4),
    ("pydantic_ai_agent.py", {"model": "openai-chat:gpt-4o"}, 3),
    ("pydantic_ai_agent.py", {"model": "openai-responses:gpt-4o"}, 3),
])  # fmt: skip
def test_a_conversation_that_only_goes_on_is_one_sample(program: str, example: dict[str, object], num_turns: int):
    report = check(program, **example)
    assert (report.num_turns, report.num_samples, report.branches) == (num_turns, 1, [])
    assert report.reward == 1.0


def test_each_break_of_smolagents_is_explained():
    """It writes its calls and their answers as text, so that no request goes on where one ended."""
    report = check("smolagents_agent.py")
    assert report.num_turns == report.num_samples == len(report.branches) + 1
    assert {b["reason"] for b in report.branches} <= {"edited_history", "sub_agent", "compaction"}
    assert report.counts["unenforced/tool_choice"] > 0
