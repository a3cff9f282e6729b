"""`verbatim eval`: models behind an API and in folders, compared in pairs; episodes that are kept, and gone on from."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.chat_server import ChatServer, Raw, call, chat_server
from verbatim.cli import eval_command
from verbatim.cli.main import main
from verbatim.config import RunConfig
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import CheckpointStore
from verbatim.logs.monitors.trajectory_log import read_trajectories
from verbatim.run.evaluation.intervals import mean_interval, paired_share, share_interval
from waiting import HANGS

pytestmark = pytest.mark.realtime

MODULE = '''
from verbatim import Example
from verbatim.environments import Episode


class Sum(Episode):
    def __init__(self, payload, seed):
        self.payload, self.seed = payload, seed
        self.messages = [{"role": "user", "content": f"{payload['a']} {payload['b']}"}]

    async def score(self, trajectory):
        said = trajectory.messages[-1]["content"]
        if said == "break":
            raise LookupError("no such word")
        return 1.0 if said == str(self.payload["a"] + self.payload["b"]) else 0.25


class Sums:
    def __init__(self, size: int = 4):
        self.size = size

    def examples(self, split):
        return [Example(id=f"sum-{n}", payload={"a": n, "b": 10 * n}) for n in range(self.size)]

    async def start(self, example, seed):
        return Sum(example.payload, seed)


class Together(Sums):
    """The rewards of an example's episodes are their places among them."""

    async def score_group(self, trajectories):
        return [float(place) for place in range(len(trajectories))]
'''
TOML = """
[model]
name = "no/model"
[orchestrator]
sampling = { max_tokens = 9, temperature = 0.5 }
[orchestrator.eval]
episodes = 8
seed = 7
[[orchestrator.train.env]]
import_path = "sums.Sums"
name = "sums"
max_turns = 2
"""


def solve(body: dict[str, Any]) -> dict[str, Any]:
    """ "good" is right; "bad" is right about 0 and, with an even seed, about 3; "broken" breaks the score of sum-1."""
    a, b = map(int, body["messages"][0]["content"].split())
    right = body["model"] == "good" or a == 0 or (a == 3 and body["seed"] % 2 == 0)
    if body["model"] == "broken" and a == 1:
        return {"content": "break"}
    return {"content": str(a + b) if right else "?"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)
    (tmp_path / "sums.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(TOML)
    yield tmp_path
    sys.modules.pop("sums", None)


def evaluate(server: ChatServer, *options: str, models: tuple[str, ...] = ("good",), status: int = 0) -> None:
    typed = [word for model in models for word in ("--model", f"{model}@{server.url}")]
    assert main(["eval", "run.toml", *typed, *options]) == status


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "played"),
    [
        ((), (4, "2")),
        (("--orchestrator.eval.episodes", "3"), (3, "1")),
        (("--orchestrator.eval.examples", "2"), (2, "4")),
        (("--examples", "3"), (3, "2")),
        (("--episodes-per-example", "5"), (4, "5")),
        (("--orchestrator.eval.examples", "2", "--episodes-per-example", "1"), (2, "1")),
    ],
)
def test_what_is_played_is_what_the_keys_and_options_say(place: Path, capsys, options, played):
    with chat_server(solve) as server:
        evaluate(server, "--json", *options)
    (model,) = as_json(capsys)["models"]
    found = model["environments"]["sums"]
    assert (found["examples"], found["episodes_per_example"]) == played
    assert found["metrics"]["examples"] == played[0]


def test_more_examples_than_episodes_are_refused(place: Path, capsys):
    typed = ["--model", "good@http://localhost:1/v1", "--orchestrator.eval.examples", "9"]
    assert main(["eval", "run.toml", *typed]) == 2
    assert "examples = 9 cannot be played with episodes = 8; set episodes to 9 or a multiple" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_are_compared_in_pairs(place: Path, capsys):
    """By hand: of 4 examples with 2 episodes each, "bad" solves sum-0 twice, and sum-3 as its seeds fall."""
    with chat_server(solve) as server:
        evaluate(server, "--json", models=("bad", "good"))
        found = as_json(capsys)
    wins = [0, 0]
    for request in server.requests:
        if request["model"] == "bad" and request["messages"][0]["content"] == "3 30":
            wins[request["seed"] % 2 == 0] += 1
    won = {"sum-0": [1.0, 1.0], "sum-1": [0.0] * 2, "sum-2": [0.0] * 2, "sum-3": [1.0] * wins[1] + [0.0] * wins[0]}
    bad, good = (model["environments"]["sums"] for model in found["models"])
    assert (bad["episodes"], bad["failed"], bad["episodes_per_example"], found["seed"]) == (8, 0, "2", 7)
    expected = share_interval(won)
    assert bad["success"] == {
        "value": expected.value,
        "interval_95": [expected.low, expected.high],
        "examples": 4,
        "episodes": 8,
    }
    rewards = mean_interval({name: [1.0 if x else 0.25 for x in each] for name, each in won.items()})
    assert bad["reward"]["interval_95"] == pytest.approx([rewards.low, rewards.high])
    assert good["reward"] == good["success"] and good["success"]["value"] == 1.0  # rewards that are all 0 or 1
    assert bad["pass_at"]["2"]["value"] == pytest.approx((1 + (wins[1] > 0)) / 4)
    assert bad["pass_hat"]["2"]["value"] == pytest.approx((1 + (wins[1] == 2)) / 4)
    (pair,) = found["pairs"]
    assert (pair["before"], pair["after"]) == ("A", "B")
    gained = paired_share({name: [1 - x for x in each] for name, each in won.items()})
    assert pair["environments"]["sums"]["success"]["interval_95"] == pytest.approx([gained.low, gained.high])
    assert (pair["environments"]["sums"]["pairs"], pair["environments"]["sums"]["lost"]) == (8, 0)
    assert pair["environments"]["sums"]["gained"] == 8 - sum(map(sum, won.values()))


@pytest.mark.slow
def test_both_models_play_the_same_episodes(place: Path):
    with chat_server(solve) as server:
        evaluate(server, "--out", "episodes.jsonl", models=("bad", "good"))
    seeds = {
        model: sorted((r["messages"][0]["content"], r["seed"]) for r in server.requests if r["model"] == model)
        for model in ("bad", "good")
    }
    assert seeds["bad"] == seeds["good"] and len(set(seeds["bad"])) == 8
    assert {r["temperature"] for r in server.requests} == {0.5} and {r["max_tokens"] for r in server.requests} == {9}


@pytest.mark.slow
def test_tables_report_and_examples_say_the_same(place: Path, capsys):
    with chat_server(solve) as server:
        evaluate(server, "--report", "report.md", "--per-example", "examples.jsonl", models=("bad", "broken"))
    out = capsys.readouterr().out
    assert f"A  bad@{server.url}" in out and f"B  broken@{server.url}" in out
    assert re.search(r"failed +0 of 8 +2 of 8 *\n", out)
    said = "2 of 8 episodes failed (2 environment): they count as not successful, and are left out of all other means"
    assert "B - A" in out and said in " ".join(out.split())
    examples = [json.loads(line) for line in Path("examples.jsonl").read_text().splitlines()]
    assert [(e["model"][:3], e["example_id"], e["successes"]) for e in examples[:3]] == [
        ("bad", "sum-0", 2),
        ("bad", "sum-1", 0),
        ("bad", "sum-2", 0),
    ]
    broken = next(e for e in examples if e["model"].startswith("broken") and e["example_id"] == "sum-1")
    assert (broken["failed"], broken["reward"]) == (2, None)
    assert broken["first_error"].startswith("environment: score raised LookupError")
    report = Path("report.md").read_text()
    assert "| success | " in report and "| B - A | " in report and "| sum-3 | " in report
    kind = "environment: score raised LookupError"
    assert f"| B | 2 | {kind} | {kind}: no such word |" in report


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_what_is_printed_fits_the_terminal(place: Path, capsys, monkeypatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    with chat_server(solve) as server:
        evaluate(server, models=("bad", "good", "broken", "other"))
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if not re.match(r"[A-D]  |examples,", line)]
    assert max(map(len, tables)) <= width and len(tables) > 20


# ---- going on


@pytest.mark.slow
def test_an_evaluation_goes_on_where_it_stopped_and_plays_failed_episodes_again(place: Path, capsys):
    down = {"1 10": True}

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        return Raw(503) if down.get(body["messages"][0]["content"]) else None

    keep = ("--out", "episodes.jsonl", "--max-retries", "1", "--json")
    with chat_server(solve, fault) as server:
        evaluate(server, *keep)
        first = as_json(capsys)["models"][0]["environments"]["sums"]
        assert (first["failed"], first["success"]["value"], first["failures"]) == (2, 0.75, {"api": 2})
        asked = len(server.requests)
        down.clear()
        evaluate(server, *keep)
        told = capsys.readouterr()
        second = json.loads(told.out)["models"][0]["environments"]["sums"]
        assert "2 episodes of episodes.jsonl had failed, and are played again" in told.err
        assert (second["failed"], second["success"]["value"]) == (0, 1.0)
        assert len(server.requests) == asked + 2
        evaluate(server, *keep)  # everything is played
        assert as_json(capsys)["models"][0]["environments"]["sums"] == second
        evaluate(server, *keep, "--episodes-per-example", "3")  # grows, and plays what is new
        assert as_json(capsys)["models"][0]["environments"]["sums"]["episodes"] == 12
        assert len(server.requests) == asked + 2 + 4
        evaluate(server, *keep, models=("good", "bad"))  # another model into the same file
        assert len(server.requests) == asked + 2 + 4 + 8
    played = [(t.example_id, t.sample_index) for _, t in read_trajectories(Path("episodes.jsonl"))]
    assert len(played) == 12 + 8


@pytest.mark.slow
def test_ctrl_c_ends_it_and_says_how_to_go_on(place: Path, capsys):
    """It comes while the sixth request is answered."""
    options = ("--out", "episodes.jsonl", "--concurrency", "1")

    def interrupts(body: dict[str, Any], tries: int) -> Raw | None:
        if len(server.requests) != 6:
            return None
        os.kill(os.getpid(), signal.SIGINT)
        return Raw(seconds=HANGS, drop=True)

    with chat_server(solve, interrupts) as server:
        evaluate(server, *options, status=130)
        assert "the episodes played so far are in episodes.jsonl; to continue:" in " ".join(
            capsys.readouterr().err.split()
        )
        assert len(Path("episodes.jsonl").read_text().splitlines()) == 5
        evaluate(server, *options)
        assert len(server.requests) == 6 + 3


def test_without_a_file_an_interrupted_evaluation_says_what_would_have_kept_it(place: Path, capsys):
    def interrupts(body: dict[str, Any], tries: int) -> Raw:
        if len(server.requests) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return Raw(seconds=HANGS, drop=True)

    with chat_server(solve, interrupts) as server:
        evaluate(server, "--concurrency", "1", status=130)
    assert "with --out FILE the same command continues where it stopped" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_line_that_a_killed_command_left_torn_is_played_again(place: Path, capsys):
    with chat_server(solve) as server:
        evaluate(server, "--out", "episodes.jsonl")
        whole = Path("episodes.jsonl").read_bytes().splitlines(keepends=True)
        Path("episodes.jsonl").write_bytes(b"".join(whole[:-1]) + whole[-1][:40])
        capsys.readouterr()
        evaluate(server, "--out", "episodes.jsonl", "--json")
        assert len(server.requests) == 9
    assert as_json(capsys)["models"][0]["environments"]["sums"]["episodes"] == 8
    assert len(Path("episodes.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "8"], "seed: 7 there, 8 now"),
        (["--orchestrator.sampling.temperature", "0.7"], "sampling.temperature: 0.5 there, 0.7 now"),
        (["--orchestrator.train.env.0.args", "{ size = 5 }"], "args: {} there, {'size': 5} now"),
        (["--orchestrator.renderer.history", "template"], "renderer.history: verbatim there, template now"),
        (["--extra-body", '{"top_k": 3}'], "extra_body: not set there, {'top_k': 3} now"),
    ],
)
def test_episodes_under_other_conditions_are_not_mixed(place: Path, capsys, options: list[str], said: str):
    with chat_server(solve) as server:
        evaluate(server, "--out", "episodes.jsonl")
        before = Path("episodes.jsonl").read_bytes()
        evaluate(server, "--out", "episodes.jsonl", *options, status=2)
        assert len(server.requests) == 8
    assert said in " ".join(capsys.readouterr().err.split())
    assert Path("episodes.jsonl").read_bytes() == before


def test_a_file_of_something_else_is_left_alone(place: Path, capsys):
    Path("notes.txt").write_text('{"step": 0, "trajectory": {}}\n')
    with chat_server(solve) as server:
        evaluate(server, "--out", "notes.txt", status=2)
        assert "notes.txt:1: not an episode of verbatim eval" in " ".join(capsys.readouterr().err.split())
        Path("notes.txt").write_text("half a line of mine")
        evaluate(server, "--out", "notes.txt", status=2)
    assert Path("notes.txt").read_text() == "half a line of mine" and server.requests == []


def test_an_api_that_is_dead_ends_the_command_and_what_was_played_is_kept(place: Path, capsys):
    """Of 20 examples the first 4 are answered."""

    def fault(body: dict[str, Any], tries: int) -> Raw | None:
        return Raw(500) if int(body["messages"][0]["content"].split()[0]) >= 4 else None

    options = (
        "--out",
        "episodes.jsonl",
        "--max-retries",
        "0",
        "--concurrency",
        "1",
        "--episodes-per-example",
        "1",
        "--orchestrator.train.env.0.args",
        "{ size = 40 }",
    )
    with chat_server(solve, fault) as server:
        evaluate(server, *options, status=1)
        assert len(server.requests) == 4 + 16
    told = " ".join(capsys.readouterr().err.split())
    assert "16 episodes in a row failed with good@" in told
    assert "the episodes played so far are in episodes.jsonl; to continue:" in told
    assert len(Path("episodes.jsonl").read_text().splitlines()) == 20


@pytest.mark.slow
def test_episodes_that_are_scored_together_are_played_together(place: Path, capsys):
    Path("run.toml").write_text(TOML.replace("sums.Sums", "sums.Together"))
    with chat_server(solve) as server:
        evaluate(server, "--out", "episodes.jsonl", "--json", "--episodes-per-example", "3")
        reward = as_json(capsys)["models"][0]["environments"]["sums"]["reward"]
        assert reward["value"] == 1.0 and reward["episodes"] == 12
        lines = Path("episodes.jsonl").read_text().splitlines(keepends=True)
        Path("episodes.jsonl").write_text("".join(lines[:-1]))
        evaluate(server, "--out", "episodes.jsonl", "--json", "--episodes-per-example", "3")
        assert len(server.requests) == 15
        assert as_json(capsys)["models"][0]["environments"]["sums"]["reward"]["value"] == 1.0


# ---- servers and their keys


def test_tokens_are_counted_and_priced(place: Path, capsys):
    with chat_server(solve) as server:
        evaluate(server, "--json", "--price", "2,3", "--price", "good=1,10", "--price", "bad=7,7")
    spent = as_json(capsys)["models"][0]["environments"]["sums"]["spent"]
    sampled = sum(len(str(11 * n).encode()) + 1 for n in range(4)) * 2  # bytes and END
    assert spent["completion_tokens"] == sampled
    assert spent["cost"] == pytest.approx((spent["prompt_tokens"] * 1 + sampled * 10) / 1e6)


@pytest.mark.slow
def test_a_key_goes_to_the_server_that_it_is_named_for(place: Path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-of-openai")
    monkeypatch.setenv("MINE", "sk-canary-of-mine")
    once = ("--examples", "1", "--episodes-per-example", "1")
    with chat_server(solve) as server:
        evaluate(server, *once)
        evaluate(server, *once, "--api-key-env", "MINE")
        evaluate(server, *once, "--api-key-env", "127.0.0.1=MINE", "--api-key-env", "elsewhere.org=OPENAI_API_KEY")
        evaluate(server, *once, "--api-key-env", "NOWHERE", status=2)
    assert "the environment variable NOWHERE is empty" in " ".join(capsys.readouterr().err.split())
    sent = [headers.get("authorization") for headers in server.headers]
    assert sent == [None, "Bearer sk-canary-of-mine", "Bearer sk-canary-of-mine"]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert main(["eval", "run.toml", "--model", "gpt-5-mini@https://api.openai.com/v1"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "OPENAI_API_KEY is empty, and https://api.openai.com/v1 needs a key" in told


def test_an_extra_body_goes_into_every_request(place: Path):
    with chat_server(lambda body: {"content": "0"}) as server:
        evaluate(server, "--extra-body", '{"seed": null, "reasoning_effort": "low"}')
    assert all("seed" not in r and r["reasoning_effort"] == "low" for r in server.requests)


@pytest.mark.slow
def test_tools_and_sub_agents_are_played_with_an_api_too(place: Path, capsys):
    """One model guesses 8 and then 4 (the calls of its third and last turn are not run), and asks no sub-agent."""
    guesses = ["guess_number", "delegate"]
    tables = [f'[[orchestrator.train.env]]\nid = "{name}"\nmax_turns = 3\n' for name in guesses]
    Path("run.toml").write_text(TOML.partition("[[")[0] + "".join(tables))

    def play(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("tools", [{}])[0].get("function", {}).get("name") != "guess":
            return {"content": "7"}
        told = [message for message in body["messages"] if message["role"] == "tool"]
        return call("guess", {"number": 4 if told else 8}, call_id=f"c{len(told)}")

    with chat_server(play) as server:
        evaluate(server, "--json", "--episodes-per-example", "1", "--examples", "15")
    found = as_json(capsys)["models"][0]["environments"]
    game, boxes = (found[name] for name in guesses)
    assert game["success"]["value"] == pytest.approx(2 / 15) and game["failed"] == 0  # secrets 8 and 4
    assert boxes["metrics"]["turns"] == 1 and boxes["failed"] == 0


# ---- models


def test_a_models_name_is_a_run_a_checkpoint_a_folder_or_an_api(tmp_path: Path):
    from verbatim.run.eval_models import find_models

    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    for step in (2, 4):
        with store.writing(step) as folder:
            (folder / "weights").mkdir()
            (folder / "weights" / "model.safetensors").write_bytes(bytes([step]) * 10)
    (run / "config.toml").write_text("[model]\n")

    def found(*typed: str) -> list[tuple[str, int]]:
        models = find_models(typed, lambda name, url: pytest.fail("no API was typed"))
        return [(str(Path(model.source).relative_to(tmp_path)), model.step) for model in models]

    assert found(f"{run}@2") == [("run/checkpoints/step_000002/weights", 2)]
    assert found(f"{run}@latest") == found(str(run)) == [("run/checkpoints/step_000004/weights", 4)]
    first, second = find_models([f"{run}@2", f"{run}@4"], lambda name, url: pytest.fail("no API"))
    assert first.fingerprint != second.fingerprint
    (run / "final").mkdir()
    assert found(str(run)) == found(f"{run}@final") == [("run/final", 4)]
    (run / "summary.json").write_text('{"format": 1, "steps": 2}')  # it ended at step 2, and was resumed since then
    assert found(str(run)) == [("run/final", 2)]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["nowhere@best"], "nowhere is not a folder; expected a run folder before @"),
        (["{run}@7"], "no checkpoint of step 7"),
        (["{run}@soon"], "expected latest, best or a step"),
        (["{run}@4", "{run}"], "is the same model as --model"),
        (["m@http://"], "expected a run folder before @"),
    ],
)
def test_a_model_that_is_not_there_is_told(place: Path, capsys, models: list[str], said: str):
    with CheckpointStore(place / "run" / "checkpoints").writing(4) as folder:
        (folder / "weights").mkdir()
    (place / "run" / "config.toml").write_text("[model]\n")
    typed = [word for model in models for word in ("--model", model.format(run=place / "run"))]
    assert main(["eval", "run.toml", *typed]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("typed", "history"), [("template", "template"), ("verbatim", "verbatim"), (None, "verbatim")])
def test_history_is_a_key_of_the_renderer(place: Path, monkeypatch, typed: str | None, history: str):
    configs = []

    def make_environments(config: RunConfig) -> None:
        configs.append(config)
        raise UsageError("that is enough")

    monkeypatch.setattr(eval_command, "find_models", lambda models, api: [SimpleNamespace(api=None)])
    monkeypatch.setattr(eval_command, "make_environments", make_environments)
    assert main(["eval", "run.toml", "--model", "here", *([] if typed is None else ["--history", typed])]) == 2
    assert [config.orchestrator.renderer.history for config in configs] == [history]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--episodes-per-example", "0"], "'0': expected a whole number of at least 1"),
        (["--k", "1,x"], "'x': expected a whole number of at least 1"),
        (["--price", "1"], "expected the prices of a million prompt and completion tokens"),
        (["--price", "good=1,-2"], "expected the prices of a million prompt and completion tokens"),
        (["--extra-body", "[]"], "is not a JSON object"),
        (["--report", "."], "is a folder; name a file"),
        (["--history", "template"], "--history is for weights that are sampled here"),
        (["--orchestrator.train.env.0.isolated", "true"], "sums' plays in other processes"),
    ],
)
def test_a_mistake_is_told(place: Path, capsys, options: list[str], said: str):
    with chat_server(solve) as server:
        try:
            evaluate(server, *options, status=2)
        except SystemExit as end:
            assert end.code == 2
        assert server.requests == []
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_configuration_of_a_run_that_is_a_link_is_refused(tmp_path: Path, capsys):
    (tmp_path / "elsewhere").write_text("hidden = 'words'\n[")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").symlink_to(tmp_path / "elsewhere")
    assert main(["eval", str(tmp_path / "run")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "config.toml is a link, which is not followed" in said and "hidden" not in said
