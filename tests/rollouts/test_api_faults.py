"""Servers that fail, tools that fail, deadlines and Ctrl-C: everything comes back, each fault counted where it was."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from ports import held_port, number_of
from rollouts.chat_server import ChatServer, Raw, call, chat_server
from rollouts.clocks import set_forward
from verbatim import StopReason, Trajectory
from verbatim.environments.tools import ToolManager
from verbatim.inference.openai import OpenAI
from verbatim.rollouts import APIMultiTurnRollout
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime

KEY = "sk-canary-0123456789"
BROKEN = '{"choices": [{"mess'


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)
    monkeypatch.setattr("verbatim.inference.http.client.CONNECT", HANGS)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def rollout_of(server: ChatServer, *, retries: int = 5, request_timeout: float = 2 * HANGS, **settings: Any):
    api = OpenAI(model="adder", base_url=server.url, max_retries=retries, request_timeout=request_timeout, api_key=KEY)
    patient = {"tool_manager": ToolManager([add]), "tool_timeout": 2 * HANGS, "trajectory_timeout": 9 * HANGS}
    return APIMultiTurnRollout(api=api, **{**patient, **settings})


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def told(results: list[Trajectory]) -> list[tuple[Any, ...]]:
    """What an episode came to, without what it took."""
    keys = ("messages", "stop_reason", "error", "input_ids", "labels", "logprobs")
    return [tuple(r.get(key) for key in keys) for r in results]


# ---- the server


def test_a_faulty_server_changes_no_trajectory_and_each_fault_is_counted_where_it_happened():
    """One request in eight fails at its first try, in one of four ways."""
    faults: dict[str, Counter[str]] = defaultdict(Counter)
    kinds = {
        "status_500": Raw(500, "boom"),
        "connection": Raw(drop=True),
        "bad_answer": Raw(body=BROKEN),
        "status_429": Raw(429, "slow down", {"Retry-After": "0.01"}),
    }

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
        if tries or digest[0] % 8:
            return None
        kind = list(kinds)[digest[1] % 4]
        faults[body["messages"][0]["content"]][kind] += 1
        return kinds[kind]

    conversations = [ask(f"{n} 2 3 4") for n in range(32)]
    body = {"return_token_ids": True}
    with chat_server() as server:
        expected = rollout_of(server, extra_body=body)(conversations)
    with chat_server(fault=fault) as server:
        results = rollout_of(server, extra_body=body)(conversations)
    assert told(results) == told(expected)
    counted = [r.info.get("request_errors", {}) for r in results]
    assert counted == [dict(faults.get(c["messages"][0]["content"], {})) for c in conversations]
    total = sum((Counter(found) for found in counted), Counter())
    assert set(total) == set(kinds)
    assert 10 <= total.total() <= 22  # 128 requests: sixteen, give or take two deviations and a half


def test_a_server_that_is_down_fails_each_trajectory_and_says_how():
    with chat_server() as server:
        pass
    with held_port() as held:  # another test is not given it meanwhile
        server.url = f"http://127.0.0.1:{number_of(held)}/v1"
        results = rollout_of(server, retries=2)([ask("1 2"), ask("3")])
    assert [r["stop_reason"] for r in results] == ["api_error"] * 2
    assert [r["truncated"] for r in results] == [True] * 2
    assert [r["turns"] for r in results] == [0, 0]
    assert [r["messages"] for r in results] == [ask("1 2")["messages"], ask("3")["messages"]]
    assert [r.info["request_errors"] for r in results] == [{"connection": 3}] * 2
    for result in results:
        assert result["error"].startswith(f"api: {server.url}: Connection error")
        assert result["error"].endswith("(3 tries)")


def test_one_conversation_that_always_fails_harms_no_other():
    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        return Raw(body=BROKEN) if body["messages"][0]["content"] == "1 2 3" and len(body["messages"]) > 1 else None

    with chat_server(fault=fault) as server:
        one, other = rollout_of(server, retries=1)([ask("1 2 3"), ask("2 3 4")])
    assert one["stop_reason"] == "api_error"
    assert "expected JSON, found" in one["error"]
    assert (one["turns"], one.info["request_errors"]) == (1, {"bad_answer": 2})
    assert [m["role"] for m in one["messages"]] == ["user", "assistant", "tool"]
    assert (other["stop_reason"], other["messages"][-1]["content"], other["error"]) == ("stop", "9", None)


def test_a_refusal_is_not_tried_again():
    with chat_server(fault=lambda body, tries: Raw(400, '{"error": "too long"}')) as server:
        (result,) = rollout_of(server)([ask("1 2")])
    assert len(server.requests) == 1
    assert result.info["request_errors"] == {"status_400": 1}
    assert result["error"] == f'api: {server.url}: status 400: {{"error": "too long"}}'


def test_a_conversation_that_cannot_be_sent_fails_alone():
    with chat_server() as server:
        one, other = rollout_of(server)([ask("\ud800"), ask("5")])
    assert one.info["request_errors"] == {"unsendable": 1}
    assert other["stop_reason"] == "stop"


@pytest.fixture
def over():
    """Whatever hangs does so until the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def play(
    rollout: APIMultiTurnRollout,
    conversations: list[dict[str, Any]],
    hangs: Counter[str],
    *,
    times: int = 1,
    **overrides: Any,
) -> list[Trajectory]:
    """The first conversation hangs, so many times; once all others have ended, its deadline passes each time."""
    ends: dict[int, Trajectory] = {}
    running = asyncio.create_task(rollout.run_each(conversations, ends.__setitem__, **overrides))
    await until(lambda: len(ends) >= len(conversations) - 1)
    for time in range(1, times + 1):
        await until(lambda time=time: hangs.total() >= time)
        set_forward()
    await asyncio.wait_for(running, HANGS)
    return [ends[index] for index in range(len(conversations))]


async def test_a_request_over_its_deadline_is_tried_again(over: threading.Event):
    hangs: Counter[str] = Counter()

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        if tries == 0 and body["messages"][0]["content"] == "1 2":
            hangs["request"] += 1
            over.wait()
            return Raw(drop=True)
        return None

    with chat_server(fault=fault) as server:
        one, other = await play(rollout_of(server, request_timeout=HANGS), [ask("1 2"), ask("3 4")], hangs, times=2)
        over.set()
    assert (one["stop_reason"], one["messages"][-1]["content"]) == ("stop", "3")
    assert one.info["request_errors"] == {"timeout": 2}  # the first try of either request
    assert "request_errors" not in other.info


async def test_a_trajectory_over_its_deadline_keeps_what_it_has(over: threading.Event):
    hangs: Counter[str] = Counter()

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        if body["messages"][-1]["content"] == "3":
            hangs["request"] += 1
            over.wait()
            return Raw(drop=True)
        return None

    with chat_server(fault=fault) as server:
        one, other = await play(rollout_of(server, trajectory_timeout=HANGS), [ask("1 2"), ask("3 4")], hangs)
        over.set()
    assert (one["stop_reason"], one["truncated"], one["turns"]) == ("api_error", True, 1)
    assert one["error"] == f"timeout: the episode took more than {HANGS:g} s"
    assert [m["role"] for m in one["messages"]] == ["user", "assistant", "tool"]
    assert (other["stop_reason"], other["messages"][-1]["content"]) == ("stop", "7")


# ---- tools


def faulty(kind: str, over: threading.Event, hangs: Counter[str]) -> ToolManager:
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        if kind == "exception":
            raise RuntimeError("broke")
        if kind == "timeout":
            hangs["tool"] += 1
            over.wait()
        return str(a + b) if kind == "none" else "7" * 10_000_000

    return ToolManager([add])


def once(body: dict[str, Any]) -> dict[str, Any]:
    """Calls `add` once and repeats the first twenty characters of what it is told."""
    last = body["messages"][-1]
    return {"content": last["content"][:20]} if last["role"] == "tool" else call("add", {"a": 3, "b": 4})


async def test_tools_that_raise_hang_or_return_10_mb_are_told_and_counted_and_harm_no_other(over: threading.Event):
    hangs: Counter[str] = Counter()
    managers = [faulty(kind, over, hangs) for kind in ("timeout", "none", "exception", "oversize", "none")]
    with chat_server(once) as server:
        rollout = rollout_of(server, tool_timeout=HANGS)
        results = await play(rollout, [ask("go")] * 5, hangs, tool_manager=managers)
    assert [r["stop_reason"] for r in results] == ["stop"] * 5
    expected = [{"timeout": 1}, None, {"exception": 1}, {"oversize": 1}, None]
    assert [r.info.get("tool_errors") for r in results] == expected
    assert [r["messages"][-1]["content"] for r in results] == [
        "Error: add did not a",
        "7",
        "Error: add failed: R",
        "7" * 20,
        "7",
    ]
    assert len(results[3]["messages"][2]["content"]) == 16_384


@pytest.mark.parametrize(
    ("kind", "said"), [("exception", "RuntimeError: broke"), ("timeout", f"within {HANGS:g} seconds")]
)
async def test_a_failing_tool_ends_the_trajectory_where_that_is_asked_for(kind: str, said: str, over: threading.Event):
    hangs: Counter[str] = Counter()
    managers = [faulty(kind, over, hangs), faulty("none", over, hangs)]
    with chat_server(once) as server:
        rollout = rollout_of(server, tool_timeout=HANGS, tool_error="stop")
        one, other = await play(rollout, [ask("go")] * 2, hangs, times=kind == "timeout", tool_manager=managers)
    assert (one["stop_reason"], one["truncated"], one["turns"]) == ("api_error", True, 1)
    assert said in one["error"]
    assert one["messages"][-1]["role"] == "tool"
    assert other["stop_reason"] == "stop"


# ---- cancelled


def hang_in_second_turn(seen: threading.Event, over: threading.Event):
    """Conversations of more than one number hang once they have called a tool; `seen` is set when two of them do."""
    hanging = set()

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        if len(body["messages"]) == 1:
            return None
        hanging.add(body["messages"][0]["content"])
        if len(hanging) == 2:
            seen.set()
        over.wait()
        return Raw(drop=True)

    return fault


def traces(folder: Path) -> dict[str, dict[str, Any]]:
    """By example."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {record["trajectory"]["example_id"]: record["trajectory"] for record in records}


def assert_all_is_kept(folder: Path) -> None:
    found = traces(folder)
    assert {name: t["stop_reason"] for name, t in found.items()} == {"0": "stop", "1": "cancelled", "2": "cancelled"}
    assert found["1"]["truncated"] is True
    assert [m["role"] for m in found["1"]["messages"]] == ["user", "assistant", "tool"]
    assert not list(folder.glob(".*"))


async def test_what_is_cancelled_is_handed_over_as_such(tmp_path: Path, over: threading.Event):
    seen, ends = threading.Event(), {}
    with chat_server(fault=hang_in_second_turn(seen, over)) as server:
        rollout = rollout_of(server, trace_dir=tmp_path, concurrency=2)
        conversations = [ask("5"), ask("1 2"), ask("3 4"), ask("never started")]
        task = asyncio.create_task(rollout.run_each(conversations, ends.__setitem__))
        await until(seen.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert {index: t.stop_reason for index, t in ends.items()} == {
        0: StopReason.STOP,
        1: StopReason.CANCELLED,
        2: StopReason.CANCELLED,
    }
    assert_all_is_kept(tmp_path)


async def test_what_had_ended_is_handed_over_though_its_trace_is_still_being_stored(tmp_path: Path):
    storing, may_store, ends = threading.Event(), threading.Event(), {}

    def wanted(trajectory: Trajectory) -> bool:
        storing.set()
        return may_store.wait(HANGS)

    with chat_server() as server:
        rollout = rollout_of(server, trace_dir=tmp_path, trace_callback=wanted)
        task = asyncio.create_task(rollout.run_each([ask("5")], ends.__setitem__))
        await until(storing.is_set)
        task.cancel()
        for _ in range(100):  # turns of the loop, after which everything has been told
            await asyncio.sleep(0)
        may_store.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(index, t.stop_reason) for index, t in ends.items()] == [(0, StopReason.STOP)]


def interrupt_when(seen: threading.Event) -> None:
    def wait() -> None:
        wait_until(seen.is_set)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("where", ["script", "notebook"])
def test_ctrl_c_ends_the_call_and_what_there_was_is_traced(tmp_path: Path, where: str, over: threading.Event):
    seen = threading.Event()
    with chat_server(fault=hang_in_second_turn(seen, over)) as server:
        rollout = rollout_of(server, trace_dir=tmp_path, concurrency=2)
        conversations = [ask("5"), ask("1 2"), ask("3 4"), ask("never started")]
        interrupt_when(seen)
        with pytest.raises(KeyboardInterrupt):
            if where == "script":
                rollout(conversations)
            else:  # a cell runs while the notebook's loop does; Ctrl-C raises, as it does by default

                async def cell() -> None:
                    rollout(conversations)

                loop = asyncio.new_event_loop()
                try:
                    loop.run_until_complete(cell())
                finally:
                    loop.close()
    assert_all_is_kept(tmp_path)
    # Its thread has told what came of it, and may still have to end.
    wait_until(lambda: all(t.name != "verbatim-loop" for t in threading.enumerate()))


# ---- the key


@pytest.mark.parametrize("from_environment", [True, False])
def test_the_key_reaches_the_server_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, from_environment: bool
):
    """The server quotes the key in a refusal, in an error, and in a body that cannot be read."""
    echoes = [Raw(500, f"bad key {KEY}"), Raw(body=f"<{KEY}>"), Raw(429, KEY), Raw(401, f'{{"error": "Bearer {KEY}"}}')]

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        return echoes[tries] if body["messages"][0]["content"] == "1 2" else None

    if from_environment:
        monkeypatch.setenv("SOME_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    with chat_server(fault=fault) as server:
        api = OpenAI(
            model="adder", base_url=server.url, api_key_env="SOME_KEY", api_key=None if from_environment else KEY
        )
        rollout = rollout_of(server, trace_dir=tmp_path)
        results = rollout([ask("1 2"), ask("3 4")], api=api)
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert [r["stop_reason"] for r in results] == ["api_error", "stop"]
    assert '"Bearer [redacted]"' in results[0]["error"]
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "[redacted]" in written
    for text in (written, caplog.text, repr(rollout), repr(api), repr(results), str([dict(r) for r in results])):
        assert KEY not in text
