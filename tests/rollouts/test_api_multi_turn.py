"""Episodes over a chat-completions server: what was said, what was sampled, how it ended, and nothing of the caller's
changed."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollouts.chat_server import END, ROLES, ChatServer, Raw, add_numbers, call, chat_server, completion
from verbatim import Example, StopReason, Trajectory, build_samples
from verbatim.core.errors import NoFlatList, UsageError
from verbatim.environments.tools import ToolManager, ToolResult
from verbatim.inference import SamplingParams
from verbatim.inference.http.client import HttpClient
from verbatim.inference.openai import OpenAI
from verbatim.rollouts import APIMultiTurnRollout, Rollout
from waiting import HANGS

pytestmark = pytest.mark.realtime


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def rollout_of(server: ChatServer, **settings: Any) -> APIMultiTurnRollout:
    api = settings.pop("api", None) or OpenAI(model="adder", base_url=server.url)
    return APIMultiTurnRollout(api=api, **{"tool_manager": ToolManager([add]), **settings})


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def script_of(*messages: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers in this order, whatever the conversation."""
    left = list(messages)
    return lambda body: left.pop(0)


def test_an_episode_calls_its_tools_until_the_model_answers():
    with chat_server() as server:
        (result,) = rollout_of(server)([ask("3 4 5")])
    first = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    second = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7, "b": 5}'}}
    assert result["messages"] == [
        {"role": "user", "content": "3 4 5"},
        {"role": "assistant", "content": "", "tool_calls": [first]},
        {"role": "tool", "content": "7", "tool_call_id": "c0", "name": "add"},
        {"role": "assistant", "content": "", "tool_calls": [second]},
        {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "12"},
    ]
    assert (result["turns"], result["stop_reason"], result["truncated"], result["error"]) == (3, "stop", False, None)
    assert [request["tools"] for request in server.requests] == [[dict(ToolManager([add])["add"].schema)]] * 3


def test_it_is_a_rollout():
    assert isinstance(APIMultiTurnRollout(api=OpenAI(model="m")), Rollout)


def test_as_many_come_back_as_were_given_in_their_order_and_nothing_is_changed():
    given = [
        Example(id="e", env="sums", messages=({"role": "user", "content": "1 2"},), payload={"answer": 3}),
        Trajectory(
            example_id="t",
            trajectory_id="t-7",
            group_id="g",
            sample_index=7,
            messages=({"role": "user", "content": "2 3"},),
        ),
        ask("3 4", id="m", answer=7),
        ask("4 5"),
        ask("3 4", id="m", answer=7),
        *(ask(f"{n} 1", id=n) for n in range(20)),
    ]
    before = copy.deepcopy([g if isinstance(g, dict) else g.messages for g in given])
    with chat_server() as server:
        results = rollout_of(server, concurrency=5)(given)
    assert [g if isinstance(g, dict) else g.messages for g in given] == before
    last = [r["messages"][-1]["content"] for r in results]
    assert last == ["3", "5", "7", "9", "7", *(str(n + 1) for n in range(20))]
    identities = [(r.example_id, r.trajectory_id, r.group_id, r.sample_index, r.env) for r in results[:5]]
    assert identities == [
        ("e", "e-0", "", 0, "sums"),
        ("t", "t-7", "g", 7, ""),
        ("m", "m-0", "", 0, ""),
        ("3", "3-0", "", 0, ""),
        ("m", "m-1", "", 1, ""),
    ]
    assert [r.info.get("task") for r in results[:4]] == [{"answer": 3}, None, {"answer": 7}, None]
    results[2].messages[0]["content"] = "changed"
    assert given[2]["messages"][0]["content"] == "3 4"


def test_concurrency_is_how_many_are_under_way(monkeypatch: pytest.MonkeyPatch):
    """Requests are answered by fours; they are counted where they begin."""
    together, ask_server = threading.Barrier(4), HttpClient.ask
    under_way: list[int] = [0]

    async def counted(self: HttpClient, *given: Any, **more: Any) -> Any:
        under_way.append(under_way[-1] + 1)
        try:
            return await ask_server(self, *given, **more)
        finally:
            under_way.append(under_way[-1] - 1)

    def wait(body: dict[str, Any], tries: int) -> Raw:
        together.wait(HANGS)
        return Raw(body=json.dumps(completion(body, add_numbers(body))))

    monkeypatch.setattr(HttpClient, "ask", counted)
    with chat_server(fault=wait) as server:
        results = rollout_of(server, concurrency=4)([ask(f"{n} 1") for n in range(12)])
    assert [r["stop_reason"] for r in results] == ["stop"] * 12
    assert max(under_way) == server.most_open == 4


def test_the_answers_length_ends_it():
    with chat_server(script_of({"content": "twelve and a", "finish_reason": "length"})) as server:
        (result,) = rollout_of(server)([ask("3 4 5")])
    assert (result["turns"], result["stop_reason"], result["truncated"]) == (1, "length", True)
    assert result["messages"][-1] == {"role": "assistant", "content": "twelve and a"}


def test_pending_calls_are_not_run_after_the_last_turn():
    with chat_server() as server:
        (result,) = rollout_of(server)([ask("3 4 5")], max_turns=2)
    assert (result["turns"], result["stop_reason"], result["truncated"]) == (2, "max_turns", True)
    assert [m["role"] for m in result["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_a_tool_may_end_it():
    def finish() -> ToolResult:
        """The end."""
        return ToolResult(content="bye", done=True, reward=0.5)

    with chat_server(script_of(call("finish", ""))) as server:
        (result,) = rollout_of(server, tool_manager=ToolManager([finish]))([ask("end")])
    assert (result["turns"], result["stop_reason"]) == (1, "stop")
    assert result["messages"][-1]["content"] == "bye"
    assert result.info["timeline"][-1]["reward"] == 0.5


def test_each_trajectory_may_have_tools_of_its_own():
    def managers(count: int) -> list[ToolManager]:
        def manager(extra: int) -> ToolManager:
            def add(a: int, b: int) -> int:
                """Add, wrongly."""
                return a + b + extra

            return ToolManager([add])

        return [manager(100 * n) for n in range(count)]

    with chat_server() as server:
        results = rollout_of(server)([ask("1 2")] * 3, tool_manager=managers(3))
        with pytest.raises(UsageError, match="tool_manager holds 2 tool managers for 3 trajectories"):
            rollout_of(server)([ask("1 2")] * 3, tool_manager=managers(2))
    assert [r["messages"][-1]["content"] for r in results] == ["3", "103", "203"]


def test_a_conversations_own_tools_are_offered():
    schema = {"type": "function", "function": {"name": "add", "description": "its own words", "parameters": {}}}
    with chat_server() as server:
        rollout_of(server)([ask("3 4", tools=[schema])])
    assert server.requests[0]["tools"] == [schema]


def test_settings_are_overridden_for_one_call():
    with chat_server() as server:
        rollout = rollout_of(server)
        params = SamplingParams(temperature=0.25, max_tokens=7, top_k=3)
        rollout([ask("5")], sampling_params=params, extra_body={"x": 1})
        rollout([ask("5")])
    first, second = ({k: r.get(k) for k in ("temperature", "max_tokens", "top_k", "x")} for r in server.requests)
    assert first == {"temperature": 0.25, "max_tokens": 7, "top_k": 3, "x": 1}
    assert second == {"temperature": 1.0, "max_tokens": 512, "top_k": None, "x": None}


@pytest.mark.parametrize(
    ("trajectories", "overrides", "said"),
    [
        ([ask("5")], {"max_turn": 3}, "no setting 'max_turn'; did you mean \"max_turns\""),
        ([ask("5")], {"max_turns": 0}, "max_turns = 0"),
        ([ask("5")], {"tool_manager": [add]}, "expected a ToolManager"),
        ([ask("5")], {"tool_error": "ignore"}, 'expected "message" or "stop"'),
        ([ask("5")], {"extra_body": {"stream": True}}, "a turn is one complete answer"),
        ([ask("5")], {"extra_body": {"n": 2}}, "a turn is one complete answer"),
        (ask("5"), {}, r"write rollout\(\[conversation\]\)"),
        (["5"], {}, r"trajectories\[0\] is a str"),
        ([ask("5"), {"messages": []}], {}, r"trajectories\[1\] has messages = \[\]"),
        ([{"messages": [{"content": "5"}]}], {}, r"trajectories\[0\].messages\[0\]"),
    ],
)
def test_a_mistake_is_explained_before_anything_is_asked(trajectories: Any, overrides: dict[str, Any], said: str):
    with chat_server() as server:
        with pytest.raises(UsageError, match=said):
            rollout_of(server)(trajectories, **overrides)
        assert server.requests == []


def test_nothing_in_is_nothing_out():
    with chat_server() as server:
        assert rollout_of(server)([]) == []


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_kept_and_not_sent_back_unless_asked(name: str):
    thought = {**call("add", {"a": 3, "b": 4}), name: "add them"}
    for send, sent in ((False, None), (True, "add them")):
        with chat_server(script_of(copy.deepcopy(thought), {"content": "7"})) as server:
            (result,) = rollout_of(server, send_reasoning=send)([ask("3 4")])
        assert result["messages"][1]["reasoning_content"] == "add them"
        assert server.requests[1]["messages"][1].get("reasoning_content") == sent


def test_usage_is_added_up():
    with chat_server() as server:
        (result,) = rollout_of(server)([ask("1 2")])
    # Prompts of the toy template: role, "1 2", END, role; then with the call and its answer.
    said = len('[{"arguments": "{\\"a\\": 1, \\"b\\": 2}", "name": "add"}]')
    assert result.info["usage"] == {
        "prompt_tokens": 6 + (6 + said + 1 + 3 + 1),
        "completion_tokens": said + 1 + 2,
        "total_tokens": 12 + said + 5 + said + 3,
    }


def test_a_call_that_cannot_be_read_is_answered_and_sent_back_as_servers_take_it():
    script = script_of(call("add", '{"a": 1, '), call("add", "[1, 2]"), call("add", {"a": 1, "b": 2}), {"content": "3"})
    with chat_server(script) as server:
        (result,) = rollout_of(server)([ask("1 2")])
    assert result.info["tool_errors"] == {"invalid_json": 1, "malformed_structure": 1}
    assert "not valid JSON" in result["messages"][2]["content"]
    assert result["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, '
    sent = [m["tool_calls"][0]["function"]["arguments"] for m in server.requests[-1]["messages"] if "tool_calls" in m]
    unread = ['{"unreadable_arguments": "{\\"a\\": 1, "}', '{"unreadable_arguments": "[1, 2]"}']
    assert sent == [*unread, '{"a": 1, "b": 2}']
    assert result["messages"][-1]["content"] == "3"


def test_nothing_but_unreadable_calls_ends_it():
    with chat_server(lambda body: call("add", "{")) as server:
        (result,) = rollout_of(server)([ask("1 2")])
    assert (result["turns"], result["stop_reason"], result["truncated"]) == (3, "malformed", True)
    assert result.info["tool_errors"] == {"invalid_json": 3}


def test_the_trace_of_nothing_but_unreadable_calls_is_no_success(tmp_path):
    with chat_server(lambda body: call("add", "{")) as server:
        rollout_of(server, trace_dir=tmp_path)([ask("1 2")])
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("fail-")
    assert json.loads(trace.read_text())["trajectory"]["stop_reason"] == "malformed"


def test_calls_without_an_id_get_one_each():
    two = call("add", {"a": 1, "b": 2}, call_id=None)
    two["tool_calls"] *= 2
    with chat_server(script_of(two, {"content": "3"})) as server:
        (result,) = rollout_of(server)([ask("1 2")])
    assert [c["id"] for c in result["messages"][1]["tool_calls"]] == ["call_0", "call_1"]
    assert [m["tool_call_id"] for m in result["messages"] if m["role"] == "tool"] == ["call_0", "call_1"]


def test_a_conversation_may_hold_a_call_without_text():
    asked = {"role": "assistant", "tool_calls": call("add", {"a": 1, "b": 2})["tool_calls"]}
    told = {"role": "tool", "content": "3", "tool_call_id": "c0", "name": "add"}
    with chat_server() as server:
        (result,) = rollout_of(server)([{"messages": [{"role": "user", "content": "1 2"}, asked, told]}])
    assert server.requests[0]["messages"][1] == result["messages"][1] == asked
    assert (result["messages"][-1]["content"], result["stop_reason"]) == ("3", "stop")


# ---- token ids

IDS = {"extra_body": {"return_token_ids": True}}


def test_ids_and_logprobs_of_the_server_make_it_trainable():
    with chat_server() as server:
        (result,) = rollout_of(server, **IDS)([ask("1 2")])
    said = b'[{"arguments": "{\\"a\\": 1, \\"b\\": 2}", "name": "add"}]'
    user, assistant, tool = ROLES["user"], ROLES["assistant"], ROLES["tool"]
    asked = [user, *b"1 2", END, assistant]
    assert result.turns[0].prompt_ids.tolist() == asked
    assert result.turns[0].completion_ids.tolist() == [*said, END]
    assert result["input_ids"] == [*asked, *said, END, tool, *b"3", END, assistant, *b"3", END]
    assert result["labels"] == [-100] * 6 + [*said, END] + [-100] * 4 + [*b"3", END]
    assert result["logprobs"][:8] == [None] * 6 + [-0.125, -0.25]
    assert result["logprobs"][-6:] == [None] * 4 + [-0.125, -0.25]
    (sample,) = build_samples(result)
    assert sample.num_trained_tokens == len(said) + 1 + 2
    assert result["turns"] == 2
    assert result.turns[0].timing.tools > result.turns[1].timing.tools  # which called none
    assert result.turns[0].tool_calls[0].arguments == {"a": 1, "b": 2}


def test_without_ids_turns_are_counted_and_nothing_is_trained():
    with chat_server() as server:
        (result,) = rollout_of(server)([ask("1 2")])
    assert (result["turns"], result.turns, result.num_unrecorded_turns) == (2, (), 2)
    assert result["samples"] == []
    for key in ("input_ids", "labels", "logprobs"):
        assert key not in dict(result) and result.get(key) is None
        with pytest.raises(NoFlatList, match=r"no turn with token ids; .*return_token_ids"):
            result[key]


@pytest.mark.parametrize(
    ("temperature", "processed", "known"),
    [(1.0, False, True), (0.7, False, False), (0.7, True, True)],
)
def test_logprobs_of_another_distribution_are_missing(temperature: float, processed: bool, known: bool):
    params = SamplingParams(temperature=temperature)
    with chat_server() as server:
        api = OpenAI(model="adder", base_url=server.url, processed_logprobs=processed)
        (result,) = rollout_of(server, api=api, sampling_params=params, **IDS)([ask("5")])
    (turn,) = result.turns
    assert turn.temperature == pytest.approx(temperature)
    assert (turn.logprobs is not None) == known
    assert result["labels"][-2:] == ([*b"5", END] if known else [-100, -100])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_token_ids": None}, "turn 0: the answer has no prompt_token_ids; use a server"),
        ({"prompt_token_ids": [-1]}, "record: trajectory '0-0', turn 0: prompt_ids"),
    ],
)
def test_ids_that_were_asked_for_and_are_not_there_fail_the_trajectory(changes: dict[str, Any], said: str):
    def broken(body: dict[str, Any], tries: int) -> Raw | None:
        if body["messages"][0]["content"] != "5":
            return None
        return Raw(body=json.dumps(completion(body, {"content": "5"}, **changes)))

    with chat_server(fault=broken) as server:
        one, other = rollout_of(server, **IDS)([ask("5"), ask("6")])
    assert one["stop_reason"] == "api_error"
    assert said in one["error"]
    assert one["messages"][-1]["content"] == "5"
    assert (one.turns, one.num_unrecorded_tokens) == ((), 2)  # what was sampled is counted all the same
    assert other["error"] is None


def test_each_request_has_a_seed_of_its_own_that_comes_again():
    def seeds() -> list[int]:
        with chat_server() as server:
            rollout_of(server, seed=7, concurrency=3)([ask("1 2", id="a"), ask("1 2", id="a"), ask("2 2", id="b")])
        return sorted(request["seed"] for request in server.requests)

    first = seeds()
    assert len(set(first)) == 6
    assert seeds() == first


# ---- synchronous, everywhere


async def test_it_can_be_called_where_a_loop_is_running():
    with chat_server() as server:
        (result,) = rollout_of(server)([ask("1 2")])
        (awaited,) = await rollout_of(server).run([ask("1 2")])
    assert result["messages"] == awaited["messages"]
    assert result.stop_reason is StopReason.STOP


async def test_each_is_handed_over_as_soon_as_it_ends():
    release = threading.Event()

    def slow(body: dict[str, Any], tries: int) -> None:
        if body["messages"][0]["content"] == "9":
            assert release.wait(HANGS)

    order = []

    def finished(index: int, trajectory: Trajectory) -> None:
        order.append((index, trajectory["messages"][-1]["content"]))
        if len(order) == 3:
            release.set()  # only once the others have been handed over

    with chat_server(fault=slow) as server:
        await rollout_of(server).run_each([ask("9"), ask("1"), ask("2"), ask("3")], finished)
    assert order[-1] == (0, "9")
    assert sorted(order[:3]) == [(1, "1"), (2, "2"), (3, "3")]
