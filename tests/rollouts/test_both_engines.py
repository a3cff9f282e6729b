"""What a call comes to is the same over a sampler and over a chat server: the tools that are offered, and rewards."""

from __future__ import annotations

import logging
import math
from fractions import Fraction

import numpy as np
import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say
from rollouts import chat_server as served
from verbatim.core.errors import UsageError
from verbatim.environments.tools import FunctionTool, ToolManager, ToolResult
from verbatim.inference.openai import OpenAI
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout

REWARDS = {"list": [1, 2], "nan": math.nan, "huge": 10**400, "text": "1", "half": Fraction(1, 2), "np": np.float32(0.5)}


def earn(which: str) -> ToolResult:
    """Earn."""
    return ToolResult(content="earned", reward=REWARDS.get(which), done={"yes": "yes"}.get(which, False))


def over_a_sampler(given, **settings):
    def script(request):
        ids = request.prompt_ids.tolist()
        return say("ok") if ids.count(END) > 1 else call("earn", which=bytes(i for i in ids if i < 256).decode())

    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=600)
    return MultiTurnRollout(sampler=sampler, template=ByteRenderer(), **settings)(given)


def over_a_server(given, **settings):
    def script(body):
        last = body["messages"][-1]
        return {"content": "ok"} if last["role"] == "tool" else served.call("earn", {"which": last["content"]})

    with served.chat_server(script) as server:
        api = OpenAI(model="m", base_url=server.url, max_retries=0)
        return APIMultiTurnRollout(api=api, extra_body={"return_token_ids": True}, **settings)(given)


@pytest.fixture(params=[over_a_sampler, pytest.param(over_a_server, marks=pytest.mark.realtime)])
def play(request):
    """A model that calls `earn` with what the user said, then says "ok"."""
    return request.param


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def answers(result):
    return [message["content"] for message in result["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize("which", ["list", "nan", "huge", "text"])
def test_a_reward_that_is_no_finite_number_fails_its_own_trajectory(play, which):
    results = play([ask("half"), ask(which), ask("np")], tool_manager=ToolManager([earn]))
    assert [r["stop_reason"] for r in results] == ["stop", "api_error", "stop"]
    assert "tool earn gave the reward" in results[1].error
    expected = "expected at most 3.4e+38" if which == "huge" else "expected a finite number"
    assert expected in results[1].error
    assert [t.reward for t in results[1].turns] == [None]
    assert [[t.reward for t in r.turns] for r in (results[0], results[2])] == [[0.5, None], [0.5, None]]
    assert all(type(r.turns[0].reward) is float for r in (results[0], results[2]))


def test_an_end_that_is_neither_true_nor_false_is_an_error_of_the_tool(play):
    (result,) = play([ask("yes")], tool_manager=ToolManager([earn]))
    assert answers(result) == ["Error: earn failed: it returned done='yes', not True or False"]
    assert (result["stop_reason"], result.info["tool_errors"]) == ("stop", {"exception": 1})


@pytest.mark.parametrize("managers", [None, [None], [ToolManager()]])
def test_a_call_without_a_tool_manager_is_answered_and_counted(play, managers):
    (result,) = play([ask("x")], tool_manager=managers)
    assert answers(result) == ["Error: there is no tool earn; available: none."]
    assert (result["stop_reason"], result.error, result.info["tool_errors"]) == ("stop", None, {"unknown_tool": 1})
    assert result["turns"] == 2


def test_a_list_of_managers_may_leave_some_trajectories_without_tools(play):
    manager = ToolManager([earn])
    results = play([ask("half")] * 3, tool_manager=[manager, None, manager])
    assert [answers(r) for r in results] == [["earned"], ["Error: there is no tool earn; available: none."], ["earned"]]
    assert [r.error for r in results] == [None] * 3


def test_tools_that_a_conversation_describes_and_nothing_runs_are_answered_and_said_beforehand(play, caplog):
    schema = {"type": "function", "function": {"name": "earn", "parameters": {"type": "object", "properties": {}}}}
    with caplog.at_level(logging.WARNING):
        results = play([ask("half", tools=[schema]), ask("half")])
    assert "1 of 2 conversations have tool schemas but no tool manager" in caplog.text
    assert answers(results[0]) == ["Error: earn: it is described, but nothing runs it here. Answer without it."]
    assert [list(r.info["tool_errors"]) for r in results] == [["invalid_arguments"], ["unknown_tool"]]
    assert [r["stop_reason"] for r in results] == ["stop", "stop"]


@pytest.mark.parametrize("retries", [-1, 1.5, True, "2"])
def test_retries_that_cannot_be_counted_are_refused(play, retries):
    with pytest.raises(UsageError, match=r"max_malformed_retries = .*; expected a whole number, at least 0"):
        play([ask("x")], max_malformed_retries=retries)


def test_what_was_said_and_answered_is_kept_where_a_tool_ends_it(play):
    def broken(which: str) -> str:
        """Fail."""
        raise OSError(f"no {which}")

    manager = ToolManager([FunctionTool(broken, name="earn")])
    (result,) = play([ask("half")], tool_manager=manager, tool_error="stop")
    assert result.error == "environment: tool earn: Error: earn failed: OSError: no half"
    assert [m["role"] for m in result["messages"]] == ["user", "assistant", "tool"]
    assert (result["stop_reason"], result.info["tool_errors"]) == ("api_error", {"exception": 1})


def test_a_tool_that_raised_is_noted_with_where_it_did(play):
    def broken(which: str) -> str:
        """Fail."""
        raise OSError(f"no {which}")

    (result,) = play([ask("half")], tool_manager=ToolManager([FunctionTool(broken, name="earn")]))
    ((kind, fault),) = result.info["tool_faults"].items()
    assert (kind, fault["count"], result["stop_reason"]) == ("earn failed: OSError", 1, "stop")
    assert 'raise OSError(f"no {which}")' in fault["first"]


def test_each_generation_and_tool_call_is_timed(play):
    (result,) = play([ask("half")], tool_manager=ToolManager([earn]))
    timeline = result.info["timeline"]
    assert [(e["turn"], e["what"]) for e in timeline] == [(0, "generation"), (0, "tool"), (1, "generation")]
    assert (timeline[1]["name"], timeline[1]["reward"]) == ("earn", 0.5)
    ends = [entry["start"] + entry["seconds"] for entry in timeline]
    assert all(end <= later["start"] for end, later in zip(ends, timeline[1:], strict=False))
