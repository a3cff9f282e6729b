"""`verbatim rollout`: a result for every task, one and only one, whatever stops it on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat_server import ChatServer, Raw, chat_server
from verbatim.cli import rollout_engines, rollout_work
from verbatim.cli.main import main, parse
from verbatim.core.errors import UsageError
from verbatim.inference.openai import OpenAI
from verbatim.logs.monitors import read_trajectories
from waiting import HANGS, wait_until

pytestmark = pytest.mark.realtime

TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

tools = [add]

def make(task):
    def add(a: int, b: int) -> int:
        """Add two numbers, and the task's own."""
        return a + b + task["extra"]
    return [add]

wrong = 5

def number(task):
    return 5
'''
KEY = "sk-canary-0123456789"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / "adding.py").write_text(TOOLS)
    yield tmp_path
    sys.modules.pop("adding", None)


def write_tasks(*tasks: dict[str, Any] | str) -> None:
    lines = [json.dumps({"messages": [{"role": "user", "content": t}]} if isinstance(t, str) else t) for t in tasks]
    Path("tasks.jsonl").write_text("".join(line + "\n" for line in lines))


def task(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def arguments(server: ChatServer, *more: str) -> list[str]:
    return [
        "rollout",
        "tasks.jsonl",
        "--base-url",
        server.url,
        "--model",
        "adder",
        "--out",
        "out.jsonl",
        "--tools",
        "adding.tools",
        *more,
    ]


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def answers() -> list[str]:
    return sorted(r["trajectory"]["messages"][-1]["content"] for r in results())


def test_every_task_gets_its_result(place: Path):
    write_tasks("1 2", task("3 4", id="x", answer=7), "5")
    with chat_server() as server:
        assert main(arguments(server)) == 0
    assert answers() == ["3", "5", "7"]
    named = next(r for r in results() if r["task"] == "x")
    assert (named["sample"], named["trajectory"]["example_id"]) == (0, "x")
    assert named["trajectory"]["info"]["task"] == {"answer": 7}
    assert [t["messages"][-1]["content"] for _, t in read_trajectories(Path("out.jsonl"))] != []
    assert KEY not in Path("out.jsonl").read_text()


def test_options_reach_the_server(place: Path):
    write_tasks("5")
    with chat_server() as server:
        options = [
            "--temperature",
            "0.5",
            "--max-tokens",
            "9",
            "--extra-body",
            '{"x": 1}',
            "--seed",
            "3",
            "--api-key-env",
            "OPENAI_API_KEY",
        ]
        assert main(arguments(server, *options)) == 0
    (request,) = server.requests
    assert {name: request[name] for name in ("model", "temperature", "max_tokens", "x")} == {
        "model": "adder",
        "temperature": 0.5,
        "max_tokens": 9,
        "x": 1,
    }
    assert "seed" in request
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_ids_are_recorded_where_they_are_asked_for(place: Path):
    write_tasks("1 2")
    with chat_server() as server:
        assert main(arguments(server, "--extra-body", '{"return_token_ids": true}')) == 0
    ((_, trajectory),) = read_trajectories(Path("out.jsonl"))
    assert trajectory["turns"] == len(trajectory.turns) == 2
    assert trajectory["labels"][-2:] == [ord("3"), 256]


def test_tools_may_be_made_for_each_task(place: Path):
    write_tasks(task("1 2", extra=10), task("1 2", extra=20))
    with chat_server() as server:
        assert main([*arguments(server), "--tools", "adding.make"]) == 0
    assert answers() == ["13", "23"]


def test_typed_again_it_does_only_what_is_left(place: Path, capsys):
    write_tasks("1 2", "3 4", "3 4")
    with chat_server() as server:
        assert main(arguments(server)) == 0
        first = Path("out.jsonl").read_text()
        num_asked = len(server.requests)
        assert main(arguments(server)) == 0
        assert (len(server.requests), Path("out.jsonl").read_text()) == (num_asked, first)
        write_tasks("9", "1 2", "3 4", "3 4", "3 4")  # the file has grown, not only at its end
        assert main(arguments(server)) == 0
        assert main(arguments(server, "--samples", "2")) == 0
    assert answers() == sorted(["9", "3", "7", "7", "7"] * 2)
    assert len({(r["task"], r["sample"]) for r in results()}) == 10
    assert "3 of 5 done before" in capsys.readouterr().err


@pytest.mark.parametrize(
    "torn", ["{", '{"format": 1, "step": 0, "task": "', '{"format": 1, "step": 0, "task": "x", "s']
)
def test_a_torn_last_line_is_repaired(place: Path, torn: str):
    write_tasks("1 2", "3 4")
    with chat_server() as server:
        assert main(arguments(server)) == 0
        whole = results()[:1]
        Path("out.jsonl").write_text(json.dumps(whole[0]) + "\n" + torn)
        assert main(arguments(server)) == 0
    assert results()[0] == whole[0]
    assert answers() == ["3", "7"]


def test_a_kill_loses_no_task_and_repeats_none(place: Path):
    """Killed twice in the middle, then left to finish."""
    write_tasks(*(f"{n} 1 1" for n in range(60)))
    wanted, killed = 0, threading.Event()

    def lines() -> list[bytes]:
        """Whole ones."""
        return Path("out.jsonl").read_bytes().split(b"\n")[:-1] if Path("out.jsonl").exists() else []

    def hang(body: dict[str, Any], tries: int) -> None:
        """Once as many as wanted are done, nothing more is answered until the kill."""
        if wanted and len(lines()) >= wanted:
            killed.wait(HANGS)

    with chat_server(fault=hang) as server:
        command = [sys.executable, "-m", "verbatim.cli"]
        for wanted in (5, 25):
            killed.clear()
            process = subprocess.Popen([*command, *arguments(server, "--concurrency", "8")], stderr=subprocess.DEVNULL)
            wait_until(lambda: process.poll() is not None or len(lines()) >= wanted)  # noqa: B023  used at once
            assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed.set()
            assert wanted <= len(lines()) < 60  # the last one may be half a line
        wanted = 0
        assert main(arguments(server)) == 0
    assert len({r["task"] for r in results()}) == len(results()) == 60
    assert answers() == sorted(str(n + 2) for n in range(60))


def test_ctrl_c_keeps_what_is_done(place: Path):
    write_tasks("5", "1 2")

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        if len(body["messages"]) > 1 and not tries:
            os.kill(os.getpid(), signal.SIGINT)
            return Raw(seconds=HANGS, drop=True)
        return None

    with chat_server(fault=fault) as server:
        assert main(arguments(server, "--concurrency", "1")) == 130
        assert answers() == ["5"]
        assert main(arguments(server)) == 0
    assert answers() == ["3", "5"]


def test_what_failed_is_said_and_done_again(place: Path, capsys):
    write_tasks("1 2", "3 4", "5")
    with chat_server(fault=lambda b, n: Raw(400, "no") if b["messages"][0]["content"] == "3 4" else None) as server:
        assert main(arguments(server)) == 1
    assert sorted(r["trajectory"]["stop_reason"] for r in results()) == ["api_error", "stop", "stop"]
    said = capsys.readouterr().err
    assert "out.jsonl: 2 stop, 1 api_error" in said
    assert "1 failed, the last: api: " in said
    with chat_server() as server:
        assert main(arguments(server)) == 0
        assert len(server.requests) == 2  # of the one task that failed
    assert answers() == ["3", "5", "7"]


def test_a_dead_server_stops_it(place: Path, capsys):
    write_tasks(*(f"{n}" for n in range(50)))
    with chat_server(fault=lambda body, tries: Raw(400, "closed for good")) as server:
        assert main(arguments(server, "--concurrency", "4")) == 1
        assert len(server.requests) < 30
    assert "stopped: 16 trajectories failed in a row; the last: api: " in capsys.readouterr().err


def test_two_at_a_time_are_refused(place: Path, capsys):
    from verbatim.logs.checkpoints.lock import FolderLock

    write_tasks("5")
    lock = FolderLock(place, ".out.jsonl.lock")
    with chat_server() as server:
        assert main(arguments(server)) == 2
        assert "out.jsonl is being written by another process" in capsys.readouterr().err
        lock.release()
        assert main(arguments(server)) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--temperature", "0.5"], "holds results of other settings (--temperature 1.0)"),
        (["--extra-body", '{"top_p": 0.5}'], "holds results of other settings (without --extra-body)"),
        (["--model", "other"], "holds results of other settings (--model adder)"),
    ],
)
def test_results_of_other_settings_are_not_mixed(place: Path, capsys, more: list[str], said: str):
    write_tasks("5")
    with chat_server() as server:
        assert main(arguments(server)) == 0
        before = Path("out.jsonl").read_text()
        assert main(arguments(server, *more)) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert Path("out.jsonl").read_text() == before


def test_a_setting_that_is_left_out_is_named(place: Path, graded: None, capsys):
    write_tasks(task("1 2", answer=3))
    with chat_server() as server:
        assert main(arguments(server, "--score", "graded.right")) == 0
        assert main(arguments(server)) == 2
        Path("out.jsonl").unlink()
        assert main(arguments(server)) == 0
        assert main(arguments(server, "--score", "graded.right")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "holds results of other settings (--score graded.right)" in said
    assert "holds results of other settings (without --score)" in said


def test_a_result_of_another_task_is_not_taken_for_this_ones(place: Path, capsys):
    write_tasks(task("5", id="a"))
    with chat_server() as server:
        assert main(arguments(server)) == 0
        write_tasks(task("6", id="a"))
        assert main(arguments(server)) == 2
    assert "holds a result of another task with the id 'a'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "tasks.jsonl:1: not valid JSON"),
        ('{"messages": []}', "tasks.jsonl:1: expected {"),
        ("[]", "tasks.jsonl:1: found [], expected a JSON object"),
        ("", "tasks.jsonl contains no task"),
        ('{"messages": [{"role": "user"}], "tools": "add"}', 'tasks.jsonl:1: expected "tools": [{'),
        ('{"messages": [{"role": "user"}], "tools": [{"name": "add"}]}', 'tasks.jsonl:1: expected "tools": [{'),
        ("\udcff", "tasks.jsonl is not UTF-8 text"),
        (
            '{"id": 1, "messages": [{"role": "user"}]}\n\n{"id": "1", "messages": [{"role": "user"}]}',
            "tasks.jsonl:3: the id '1' is in line 1 too",
        ),
    ],
)
def test_a_mistake_in_the_tasks_is_named(place: Path, capsys, content: str, said: str):
    Path("tasks.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with chat_server() as server:
        assert main(arguments(server)) == 2
        assert server.requests == []
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-turn", "3"], "verbatim rollout has no option --max-turn"),
        (["--tools", "adding.wrong"], "adding.wrong is a int; expected a list of typed functions"),
        (["--tools", "adding.number"], "adding.number returned 5 for a task; expected a list of typed functions"),
        (["--tools", "nowhere.tools"], "there is no module 'nowhere'"),
        (["--temperature", "-1"], "temperature = -1"),
        (["--base-url", "localhost"], "base_url 'localhost'"),
    ],
)
def test_a_mistake_in_an_option_is_named(place: Path, capsys, more: list[str], said: str):
    write_tasks("5")
    with chat_server() as server:
        assert main(arguments(server, *more)) == 2
    assert said in capsys.readouterr().err


def test_a_body_that_is_no_object_is_named(place: Path, capsys):
    write_tasks("5")
    with chat_server() as server, pytest.raises(SystemExit) as ended:
        main(arguments(server, "--extra-body", "[1]"))
    assert ended.value.code == 2
    assert "'[1]' is not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"some": "data"}\n', "a note", '{"step": 0}', "[]\n", "{\n"])
def test_an_out_file_of_something_else_is_left_alone(place: Path, capsys, content: str):
    write_tasks("5")
    Path("out.jsonl").write_text(content)
    with chat_server() as server:
        assert main(arguments(server)) == 2
    assert "out.jsonl:1: not a result of verbatim rollout" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == content
    assert sorted(p.name for p in place.iterdir() if "out" in p.name) == [".out.jsonl.lock", "out.jsonl"]


# ---- environments, simulated users and scores

GRADED = """
def right(trajectory, task):
    return {"right": 0.75 * (trajectory.messages[-1]["content"] == str(task["answer"])), "short": 0.25}

async def later(trajectory, task):
    return 1.0

nothing = 3
"""


WINNING = """
from verbatim import Example
from verbatim.environments import Episode

class Greeting(Episode):
    messages = [{"role": "user", "content": "Hi."}]

    async def score(self, trajectory):
        return 0.5

class Winning:
    def examples(self, split):
        return [Example(id="one")]

    async def start(self, example, seed):
        return Greeting()

    def is_success(self, trajectory):
        return trajectory.reward == 0.5
"""


@pytest.fixture
def graded(place: Path) -> Iterator[None]:
    (place / "graded.py").write_text(GRADED)
    yield
    sys.modules.pop("graded", None)


def ask(server: ChatServer, *more: str) -> list[str]:
    return ["rollout", "--base-url", server.url, "--model", "player", "--out", "out.jsonl", *more]


def count_up(body: dict[str, Any]) -> dict[str, Any]:
    """Guesses 1, 2, 3, ..."""
    told = sum(message["role"] == "tool" for message in body["messages"])
    function = {"name": "guess", "arguments": json.dumps({"number": told + 1})}
    return {"content": "", "tool_calls": [{"id": f"c{told}", "type": "function", "function": function}]}


def test_an_environment_is_played_and_scored_over_a_server(place: Path, capsys):
    options = ["--env", "guess-number", "--env-args", '{"high": 3, "max_guesses": 2}', "--samples", "2"]
    with chat_server(count_up) as server:
        assert main(ask(server, *options)) == 0
        assert "6 stop; mean reward 0.667 of 6" in capsys.readouterr().err  # 1 and 2 are found in two guesses
        assert server.requests[0]["tools"][0]["function"]["name"] == "guess"
        num_requests = len(server.requests)
        assert main(ask(server, *options)) == 0
        assert len(server.requests) == num_requests == 2 * (1 + 2 + 2)
        assert main(ask(server, *options, "--split", "train")) == 2
    rewards = {(r["task"], r["sample"]): r["trajectory"]["reward"] for r in results()}
    assert rewards == {(f"secret-{n}", k): float(n < 3) for n in (1, 2, 3) for k in (0, 1)}
    assert {r["trajectory"]["env"] for r in results()} == {"guess-number"}
    assert "holds results of other settings (--split eval)" in capsys.readouterr().err


def test_what_is_stored_of_an_environment_is_its_result(place: Path, monkeypatch: pytest.MonkeyPatch):
    (place / "winning.py").write_text(WINNING)
    with chat_server(lambda body: {"content": "hello"}) as server:
        assert main(ask(server, "--env", "winning.Winning", "--trace-dir", "traces")) == 0
    sys.modules.pop("winning", None)
    (stored,) = [json.loads(path.read_text()) for path in Path("traces").glob("*.json")]
    assert results()[0]["trajectory"]["info"]["is_success"] is True
    assert stored["trajectory"]["info"]["is_success"] is True


def test_a_score_is_given_the_trajectory_and_the_task(graded: None, capsys):
    write_tasks(task("1 2", id="a", answer=3), task("1 2", id="b", answer=4))
    with chat_server() as server:
        assert main(arguments(server, "--score", "graded.right")) == 0
    assert "mean reward 0.625 of 2" in capsys.readouterr().err
    found = {r["task"]: r["trajectory"] for r in results()}
    assert {name: t["reward"] for name, t in found.items()} == {"a": 1.0, "b": 0.25}
    assert found["a"]["reward_parts"] == {"right": 0.75, "short": 0.25}


def test_a_score_may_be_async(graded: None):
    write_tasks("1 2")
    with chat_server() as server:
        assert main(arguments(server, "--score", "graded.later")) == 0
    assert results()[0]["trajectory"]["reward"] == 1.0


def converse(body: dict[str, Any]) -> dict[str, Any]:
    """The assistant repeats; the user asks once more, and ends."""
    said = [message["content"] for message in body["messages"]]
    if body["model"] == "player":
        return {"content": f"You said {said[-1]}"}
    return {"content": "Thanks. ###STOP###" if len(said) > 4 else "And now?"}


def test_a_model_plays_the_user_from_the_other_side(place: Path):
    write_tasks(task("hello", user="You are Ada."))
    (place / "user.txt").write_text("Be a user.")
    with chat_server(converse) as server:
        assert main(ask(server, "tasks.jsonl", "--user-model", "person", "--user-prompt", "user.txt")) == 0
    trajectory = results()[0]["trajectory"]
    assert [(m["role"], m["content"]) for m in trajectory["messages"]] == [
        ("user", "hello"),
        ("assistant", "You said hello"),
        ("user", "And now?"),
        ("assistant", "You said And now?"),
    ]
    asked = [request["messages"] for request in server.requests if request["model"] == "person"]
    assert [(m["role"], m["content"]) for m in asked[-1]] == [
        ("system", "Be a user.\n\nYou are Ada."),
        ("assistant", "hello"),
        ("user", "You said hello"),
        ("assistant", "And now?"),
        ("user", "You said And now?"),
    ]
    assert trajectory["info"]["user_usage"]["completion_tokens"] > 0
    assert trajectory["stop_reason"] == "stop"


def test_the_server_of_the_user_is_not_given_the_key_of_the_other(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINE", "key-of-the-model")
    monkeypatch.setenv("OTHER", "key-of-the-user")
    write_tasks("hello")
    more = ["tasks.jsonl", "--api-key-env", "MINE", "--user-model", "person", "--max-turns", "2"]
    with (
        chat_server(lambda body: {"content": "hello"}) as server,
        chat_server(lambda body: {"content": "###STOP###"}) as users,
    ):
        assert main([*ask(server, *more), "--user-base-url", users.url, "--user-api-key-env", "OTHER"]) == 0
        Path("out.jsonl").unlink()
        assert main([*ask(server, *more), "--user-base-url", users.url]) == 0
    assert [headers.get("authorization") for headers in users.headers] == ["Bearer key-of-the-user", None]
    assert {headers["authorization"] for headers in server.headers} == {"Bearer key-of-the-model"}


def test_a_user_that_never_ends_is_cut_off_by_the_turns(place: Path):
    write_tasks("hello")
    with chat_server(lambda body: {"content": "go on"}) as server:
        assert main(ask(server, "tasks.jsonl", "--user-model", "person", "--max-turns", "3")) == 0
    trajectory = results()[0]["trajectory"]
    assert [m["role"] for m in trajectory["messages"]] == ["user", "assistant"] * 3
    assert trajectory["stop_reason"] == "max_turns"
    asked = [request["model"] for request in server.requests]
    assert asked == ["player", "person"] * 2 + ["player"]  # nothing could be answered to a third message


def test_the_timeout_of_a_request_is_that_of_the_users_server_too(place: Path, monkeypatch: pytest.MonkeyPatch):
    timeouts = []

    def simulator(api: OpenAI) -> None:
        timeouts.append(api.request_timeout)
        raise UsageError("that is enough")

    write_tasks("hello")
    monkeypatch.setattr(rollout_work, "UserSimulator", simulator)
    common = ["rollout", "tasks.jsonl", "--base-url", "http://localhost:1", "--model", "m", "--out", "o.jsonl"]
    for more in (["--request-timeout", "7"], []):
        assert main([*common, "--user-model", "person", *more]) == 2
    assert timeouts == [7, 600]


INFERENCE = """
[model]
name = "trained"
[inference]
backend = "{backend}"
[[orchestrator.train.env]]
id = "guess_number"
"""


def test_results_of_other_samplers_are_not_mixed(place: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A run's file and a chat server may both name the model "trained"."""
    monkeypatch.setattr("verbatim.models.loading.load_tokenizer", lambda model: None)
    monkeypatch.setattr(rollout_engines, "make_renderer", lambda *_: None)
    monkeypatch.setattr(rollout_engines, "check_backend", lambda config: None)
    monkeypatch.setattr(rollout_engines, "MultiTurnRollout", lambda **_: None)
    write_tasks("5")
    for backend in ("torch", "vllm"):
        Path(f"{backend}.toml").write_text(INFERENCE.format(backend=backend))
    common = ["rollout", "tasks.jsonl", "--out", "out.jsonl"]
    with chat_server() as server:
        assert main([*common, "--base-url", server.url, "--model", "trained"]) == 0
    assert main([*common, "--inference", "torch.toml"]) == 2
    assert "holds results of other settings (without --inference)" in " ".join(capsys.readouterr().err.split())
    told = [
        rollout_engines.engine_of(parse([*common, "--inference", f"{name}.toml"])).settings
        for name in ("torch", "vllm")
    ]
    assert told == [
        {"inference": "torch.toml with inference.backend = torch"},
        {"inference": "vllm.toml with inference.backend = vllm"},
    ]


def test_the_seeds_of_episodes_do_not_depend_on_what_was_done_before(place: Path):
    common = ["rollout", "--out", "o.jsonl", "--env", "guess_number", "--env-args", '{"high": 3}', "--seed", "9"]
    plan = rollout_work.plan_of(parse(common))
    given = []

    class Rollout:
        """Its own seed, of the requests, is another one for each number of tasks that were done."""

        async def run_environment(self, environment: Any, pairs: Any, take: Any, *, env: str, seed: int) -> None:
            given.append(seed)

    for left in (plan.jobs, plan.jobs[1:]):
        asyncio.run(plan.work(left, lambda index, trajectory: None)(Rollout()))
    assert given == [9, 9]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ([], "either the tasks of a file or an environment"),
        (["tasks.jsonl", "--env", "guess_number"], "either the tasks of a file or an environment"),
        (["tasks.jsonl", "--split", "train"], "--split: it needs --env NAME"),
        (
            ["--env", "guess_number", "--score", "graded.right"],
            "--score: an environment has its own tools, user and score",
        ),
        (["--env", "guess_numbr"], "there is no environment 'guess_numbr'"),
        (["tasks.jsonl", "--score", "graded.nothing"], "--score graded.nothing is a int; expected a function"),
        (["tasks.jsonl", "--user-prompt", "user.txt"], "a simulated user needs a model: --user-model NAME"),
        (["tasks.jsonl", "--user-model", "x", "--user-prompt", "none.txt"], "--user-prompt: there is no file none.txt"),
    ],
)
def test_options_that_do_not_go_together_are_refused(graded: None, typed: list[str], told: str, capsys):
    write_tasks("1 2")
    with chat_server() as server:
        assert main(ask(server, *typed)) == 2
    assert told in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
