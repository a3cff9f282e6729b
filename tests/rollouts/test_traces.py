"""Traces: whole or absent, one file for each trajectory, and a callback that fails loses none."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat_server import ChatServer, call, chat_server
from verbatim import Trajectory, Turn
from verbatim.core.trajectory_json import trajectory_from_json
from verbatim.core.types import TurnTiming
from verbatim.environments.tools import ToolManager
from verbatim.inference.openai import OpenAI
from verbatim.inspection.doctor import LogFile, detect_format, known_formats
from verbatim.rollouts import APIMultiTurnRollout, TraceFolder
from waiting import HANGS, wait_until


def trajectory(**changes: Any) -> Trajectory:
    turn = Turn(
        prompt_ids=[1, 2],
        completion_ids=[3, 4],
        logprobs=[-0.1, -1e-30],
        policy_versions=[7, 8],
        timing=TurnTiming(generated=1.5, tools=0.25),
    )
    timeline = [{"what": "tool", "seconds": 0.25}]
    fields = {
        "example_id": "x",
        "trajectory_id": "x-0",
        "turns": (turn,),
        "stop_reason": "stop",
        "messages": ({"role": "user", "content": "é"},),
        "info": {"timeline": timeline},
    }
    return Trajectory(**{**fields, **changes})


def read(path: Path | None) -> dict[str, Any]:
    assert path is not None
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_trace_holds_the_whole_record(tmp_path: Path):
    record = read(TraceFolder(tmp_path).store(trajectory(reward=float("nan"))))
    assert (record["success"], record["callback_errors"]) == (True, [])
    told = record["trajectory"]
    assert told["messages"] == [{"role": "user", "content": "é"}]
    assert (told["stop_reason"], told["error"], told["reward"]) == ("stop", None, "NaN")
    assert told["info"]["timeline"] == [{"what": "tool", "seconds": 0.25}]
    back = trajectory_from_json(told)
    (turn,), (given,) = back.turns, trajectory().turns
    assert turn.path.ids().tolist() == [1, 2, 3, 4]
    assert turn.logprobs.tobytes() == given.logprobs.tobytes()
    assert turn.policy_versions.tolist() == [7, 8]
    assert turn.timing == TurnTiming(generated=1.5, tools=0.25)


def test_the_doctor_reads_a_trace(tmp_path: Path):
    path = TraceFolder(tmp_path).store(trajectory())
    file = LogFile(path)
    (logged,) = detect_format(file, known_formats()).read(file)
    assert logged.trajectory.turns[0].completion_ids.tolist() == [3, 4]


def test_samples_of_one_prompt_and_runs_into_one_folder_overwrite_nothing(tmp_path: Path):
    folders = [TraceFolder(tmp_path) for _ in range(2)]
    names = {folder.store(trajectory(reward=float(n))) for n in range(20) for folder in folders}
    assert len(names) == len(list(tmp_path.iterdir())) == 40
    rewards = sorted(read(path)["trajectory"]["reward"] for path in tmp_path.iterdir())
    assert rewards == sorted([float(n) for n in range(20)] * 2)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b\0c", "ü" * 500, ""])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    path = TraceFolder(tmp_path / "in").store(trajectory(trajectory_id=name, example_id=name))
    assert path is not None
    assert path.parent == tmp_path / "in"
    assert list((tmp_path / "in").iterdir()) == [path]
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [({}, "ok-"), ({"stop_reason": "length"}, "fail-"), ({"error": "tool: broke"}, "fail-")],
)
def test_without_a_callback_success_is_an_end_of_its_own(tmp_path: Path, changes: dict[str, Any], prefix: str):
    path = TraceFolder(tmp_path).store(trajectory(**changes))
    assert path is not None
    assert path.name.startswith(prefix)


def test_callbacks_decide_what_is_stored_and_how_it_is_called(tmp_path: Path):
    callbacks = {"trace_callback": lambda t: t["reward"] >= 0.5, "success_callback": lambda t: t.reward == 1}
    folder = TraceFolder(tmp_path, **callbacks)
    stored = [folder.store(trajectory(reward=reward)) for reward in (0.0, 0.5, 1.0)]
    assert stored[0] is None
    assert [path.name.split("-")[0] for path in stored[1:]] == ["fail", "ok"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("which", ["trace_callback", "success_callback"])
def test_a_callback_that_raises_is_warned_about_and_the_trace_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
):
    def broken(trajectory: Mapping[str, Any]) -> bool:
        raise KeyError("answer")

    with caplog.at_level(logging.WARNING):
        path = TraceFolder(tmp_path, **{which: broken}).store(trajectory())
    record = read(path)
    assert record["callback_errors"] == [f"{which} raised KeyError: 'answer'"]
    assert record["success"] is (which == "trace_callback")
    assert f"{which} raised on trajectory x-0; its trace is kept" in caplog.text
    assert "Traceback" in caplog.text


def test_a_disk_that_refuses_loses_the_trace_and_not_the_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert TraceFolder(tmp_path).store(trajectory()) is None
    assert "the trace of trajectory x-0 was not written: OSError: [Errno 28] No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    replace = os.replace

    def look_first(source: Path, target: Path) -> None:
        seen.append([path.name for path in tmp_path.glob("*.json")])
        assert json.loads(Path(source).read_text())
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_first)
    TraceFolder(tmp_path).store(trajectory())
    assert seen == [[]]
    assert len(list(tmp_path.glob("*.json"))) == 1


# ---- of a rollout


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def rollout_of(server: ChatServer, folder: Path, **settings: Any) -> APIMultiTurnRollout:
    api = OpenAI(model="adder", base_url=server.url)
    return APIMultiTurnRollout(api=api, tool_manager=ToolManager([add]), trace_dir=folder, **settings)


@pytest.mark.realtime
def test_a_rollout_stores_each_trajectory_as_soon_as_it_ends(tmp_path: Path):
    stored = threading.Event()

    def wait(body: dict[str, Any], tries: int) -> None:
        if body["messages"][0]["content"] == "9":
            assert stored.wait(HANGS)  # answered only once the other one is on disk

    def on_disk() -> None:
        wait_until(lambda: list(tmp_path.glob("ok-*.json")))
        stored.set()

    threading.Thread(target=on_disk, daemon=True).start()
    with chat_server(fault=wait) as server:
        rollout_of(server, tmp_path)([{"messages": [{"role": "user", "content": text}]} for text in ("9", "1 2")])
    assert len(list(tmp_path.glob("ok-*.json"))) == 2


@pytest.mark.realtime
def test_a_trace_tells_the_time_of_each_generation_and_tool_call(tmp_path: Path):
    def script(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "done"} if len(body["messages"]) > 1 else call("add", {"a": 1, "b": "x"})

    with chat_server(script) as server:
        rollout_of(server, tmp_path)([{"messages": [{"role": "user", "content": "go"}]}])
    (path,) = tmp_path.iterdir()
    info = read(path)["trajectory"]["info"]
    kinds = [(e["turn"], e["what"], e.get("name"), e.get("error")) for e in info["timeline"]]
    asked, ran = (0, "generation", None, None), (0, "tool", "add", "invalid_arguments")
    assert kinds == [asked, ran, (1, "generation", None, None)]
    ends = 0.0
    for entry in info["timeline"]:
        assert entry["start"] >= ends
        ends = entry["start"] + entry["seconds"]
    assert info["tool_errors"] == {"invalid_arguments": 1}


@pytest.mark.realtime
def test_a_callback_sees_the_task_and_a_failing_one_harms_no_result(tmp_path: Path):
    def is_right(result: Mapping[str, Any]) -> bool:
        return result["messages"][-1]["content"] == result["info"]["task"]["answer"]

    with chat_server() as server:
        results = rollout_of(server, tmp_path, success_callback=is_right)(
            [
                {"messages": [{"role": "user", "content": "1 2"}], "answer": "3"},
                {"messages": [{"role": "user", "content": "1 2"}], "answer": "4"},
                {"messages": [{"role": "user", "content": "1 2"}]},
            ]
        )
    assert [r["stop_reason"] for r in results] == ["stop"] * 3
    names = sorted(path.name.split("-")[:2] for path in tmp_path.iterdir())
    assert names == [["fail", "1"], ["fail", "2"], ["ok", "0"]]
