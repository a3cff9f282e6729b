"""A judge scores any environment: asked once for equal requests, counted, and never a reward of 0 where it fails."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from e2e.tiny_runs import FILTERS, LOTS, TOML, build_tiny_model, train_lines, workplace
from rollouts.chat_server import Raw, chat_server
from verbatim import Example, Trajectory
from verbatim.cli.main import main
from verbatim.core.errors import JudgeFailed, UsageError
from verbatim.environments import Episode
from verbatim.environments.resolve import create_environment
from verbatim.inspection.envcheck.play import CheckedEnvironment
from verbatim.inspection.envcheck.players import WrittenPlayer
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.judges import Judge, Judged, RewardModel
from waiting import HANGS

pytestmark = pytest.mark.realtime

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)


CRITERIA = {"correct": "The sum is right.", "brief": "It is short."}


class Sum(Episode):
    messages = ({"role": "user", "content": "2 + 2?"},)

    async def score(self, trajectory: Trajectory) -> float:
        return float(trajectory.messages[-1]["content"] == "4")


class Sums:
    def examples(self, split: str) -> list[Example]:
        return [Example(id="sum", payload={"answer": "4"})]

    async def start(self, example: Example, seed: int) -> Sum:
        return Sum()

    async def score_group(self, trajectories: Any) -> list[float]:
        raise AssertionError("it would replace what the judge said")


def said(text: str):
    return lambda body: {"content": text}


def grade(judge: Any, messages: Any = TALK, fields: Any = None) -> tuple[dict[str, float], Counter[str]]:
    usage: Counter[str] = Counter()
    return dict(asyncio.run(judge.grade(messages, usage, fields))), usage


def play(environment: Any, answer: str = "4", size: int = 1) -> list[Trajectory]:
    stage = CheckedEnvironment(name="it", environment=environment, limits=EpisodeLimits(timeout=HANGS))
    players = [lambda seed: WrittenPlayer([{"role": "assistant", "content": answer}])] * size
    return [play.trajectory for play in asyncio.run(stage.play("w", players, environment.examples("train")[0]))]


# ---- grades


def test_each_criterion_is_a_part_of_the_reward_and_what_was_spent_is_counted():
    with chat_server(said('I think {"correct": 10, "brief": 4}.')) as server:
        judge = Judge(
            model="big",
            base_url=server.url,
            criteria=CRITERIA,
            price={"prompt": 2.0, "completion": 10.0},
            show=["answer"],
        )
        parts, usage = grade(judge, fields={"answer": "4", "hidden": "no"})
    assert parts == {"correct": 0.5, "brief": pytest.approx(0.2)}
    (request,) = server.requests
    assert request["model"] == "big"
    assert "- correct: The sum is right.\n- brief: It is short." in request["messages"][0]["content"]
    assert json.loads(request["messages"][1]["content"]) == {"conversation": TALK, "answer": "4"}
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    assert tokens[0] > 100 and tokens[1] > 10  # the server counts bytes
    assert usage["cost"] == pytest.approx((2.0 * tokens[0] + 10.0 * tokens[1]) / 1e6)
    assert (usage["requests"], usage["cached"], usage["retries"]) == (1, 0, 0)


def test_weights_and_the_scale_are_the_users():
    with chat_server(said('{"correct": 3, "brief": 0}')) as server:
        weights = {"correct": 0.8, "brief": 0.2}
        judge = Judge(model="m", base_url=server.url, criteria=CRITERIA, weights=weights, scale=4)
        assert grade(judge)[0] == {"correct": pytest.approx(0.6), "brief": 0.0}


def test_equal_requests_are_asked_once_also_at_the_same_time_and_another_setting_asks_again():
    with chat_server(said('{"quality": 5}'), lambda body, tries: None) as server:
        judge = Judge(model="m", base_url=server.url)

        async def together() -> list[dict[str, float]]:
            return await asyncio.gather(*(judge.grade(TALK, usage) for _ in range(8)))

        usage: Counter[str] = Counter()
        assert asyncio.run(together()) == [{"quality": 0.5}] * 8
        assert (len(server.requests), usage["requests"], usage["cached"]) == (1, 1, 7)
        assert grade(judge)[1]["cached"] == 1  # in another event loop
        grade(Judge(model="m", base_url=server.url, temperature=0.5))
        assert len(server.requests) == 2


def test_a_folder_keeps_answers_for_other_processes_and_half_of_a_file_is_asked_again(tmp_path: Path):
    with chat_server(said('{"quality": 5}')) as server:
        settings = {"model": "m", "base_url": server.url, "cache": str(tmp_path / "cache")}
        first = Judge(**settings)
        grade(first)
        assert grade(Judge(**settings))[1] == Counter(cached=1)
        assert grade(copy.deepcopy(first))[1] == Counter(cached=1)
        (file,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
        file.write_text(file.read_text()[:5])
        assert grade(Judge(**settings))[1]["requests"] == 1
        assert len(server.requests) == 2


def test_a_server_that_fails_is_asked_again_and_the_retries_counted():
    with chat_server(said('{"quality": 10}'), lambda body, tries: Raw(status=500) if tries < 2 else None) as server:
        parts, usage = grade(Judge(model="m", base_url=server.url))
    assert parts == {"quality": 1.0}
    assert (usage["requests"], usage["retries"], len(server.requests)) == (1, 2, 3)


def test_an_answer_that_cannot_be_read_is_asked_for_again_with_the_reason():
    def script(body: Any) -> dict[str, str]:
        return {"content": '{"quality": 11}' if len(body["messages"]) == 2 else '{"quality": 7}'}

    with chat_server(script) as server:
        parts, usage = grade(Judge(model="m", base_url=server.url))
    assert parts == {"quality": pytest.approx(0.7)}
    assert usage["unreadable"] == 1
    assert "quality: found 11, expected a number from 0 to 10" in server.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("text", ["good", "{}", '{"quality": "9"}', '{"quality": -1}', '{"quality": true}', "[7]"])
def test_a_judge_that_gives_no_grades_fails(text: str):
    with chat_server(said(text)) as server, pytest.raises(JudgeFailed, match="m gave no grades in 3 answers"):
        grade(Judge(model="m", base_url=server.url))


def test_a_reward_model_gives_a_number_from_any_place_of_its_answer():
    answer = Raw(body=json.dumps({"data": [{"probs": [0.25]}], "usage": {"prompt_tokens": 9}}))
    with chat_server(fault=lambda body, tries: answer) as server:
        url = f"{server.url}/chat/completions"
        model = RewardModel(url=url, model="rm", path="data.0.probs.0", weight=2.0)
        parts, usage = grade(model)
        assert (parts, usage["prompt_tokens"]) == ({"reward_model": 0.5}, 9)
        assert server.requests[0] == {"model": "rm", "messages": TALK}
        with pytest.raises(JudgeFailed, match="expected a number at 'reward', found"):
            grade(RewardModel(url=url))


# ---- around an environment


def test_a_judged_environment_has_the_judges_reward_and_where_asked_its_own():
    with chat_server(said('{"quality": 8}')) as server:
        judge = {"model": "m", "base_url": server.url}
        (judged,) = play(Judged(Sums(), judge))
        assert (judged.error, judged.reward, judged.reward_parts) == (None, pytest.approx(0.8), {"quality": 0.8})
        assert judged.info["judge_usage"]["requests"] == 1
        (both,) = play(Judged(Sums(), judge, own_reward=0.5))
        assert both.reward_parts == {"own": 0.5, "quality": 0.8}
        (wrong,) = play(Judged(Sums(), judge, own_reward=0.5), answer="5")
        assert wrong.reward_parts == {"own": 0.0, "quality": 0.8}


def test_a_judge_that_fails_fails_the_episode_which_has_no_reward_and_says_what_it_spent():
    with chat_server(said("no idea")) as server:
        trajectories = play(Judged(Sums(), Judge(model="m", base_url=server.url)), size=2)
    for trajectory in trajectories:
        assert trajectory.reward is None
        assert trajectory.error.startswith("judge: m gave no grades in 3 answers: no JSON object in 'no idea'")
        assert trajectory.info["judge_usage"]["failed"] == 1
    assert len(server.requests) == 3  # the second episode's were in the cache


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({"model": "m", "criterias": {}}, 'unknown parameter "criterias"; did you mean "criteria"?'),
        ({}, "model: missing"),
        ({"model": "m"}, "the environment variable OPENAI_API_KEY is empty"),
        ({"model": "m", "base_url": "localhost:8000"}, "expected an address such as"),
        (
            {"model": "m", "base_url": "http://x", "criteria": {}},
            "expected a table from the name of each criterion to what earns its full grade",
        ),
        ({"model": "m", "base_url": "http://x", "weights": {"good": 1.0}}, "expected a number for each of quality"),
        ({"model": "m", "base_url": "http://x", "price": {"in": 1.0}}, "expected the price of a million tokens"),
        ({"model": "m", "base_url": "http://x", "prompt": "Grade it."}, "expected a string that contains {criteria}"),
        ("gpt-5", "judge: found 'gpt-5' (str), expected Judge(model=...)"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_a_run(judge: Any, words: str, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError) as refused:
        Judged(Sums(), judge)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "args", "words"),
    [
        (Sums, None, "expected an environment, MyEnv(), or its id"),
        (Sums(), {"size": 3}, "for an environment that already exists; pass them to its class"),
    ],
)
def test_an_environment_that_cannot_be_judged_is_refused(environment: Any, args: Any, words: str):
    with pytest.raises(UsageError) as refused:
        Judged(environment, Judge(model="m", base_url="http://x"), args=args)
    assert words in str(refused.value)


def test_a_reward_model_is_sent_no_key_but_the_one_that_is_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    monkeypatch.delenv("RM_KEY", raising=False)
    assert RewardModel(url="http://x").api_key_env is None
    with pytest.raises(UsageError, match="the environment variable RM_KEY is empty; expected the key of http://x"):
        RewardModel(url="http://x", api_key_env="RM_KEY")


@pytest.mark.slow
def test_a_judge_is_one_line_of_toml_and_its_counts_are_metrics(tmp_path: Path, monkeypatch, caplog):
    """The judge fails on conversations of an even length."""
    monkeypatch.setattr("verbatim.logs.monitors.learning_curve.is_installed", lambda package: False)
    model = build_tiny_model(tmp_path / "model")

    def script(body: Any) -> dict[str, str]:
        length = len(body["messages"][1]["content"])
        return {"content": f'{{"quality": {length % 9}}}' if length % 2 else "?"}

    with chat_server(script) as server, workplace(tmp_path / "work", {"lots": LOTS}) as folder:
        judge = f'judge = {{ model = "m", base_url = "{server.url}", price = {{ prompt = 1.0 }} }}'
        (folder / "run.toml").write_text(
            TOML.replace(FILTERS, "").format(model=model)
            + f'id = "judged"\nargs = {{ environment = "lots.Lots", {judge} }}\n'
        )
        assert main(["config", "run.toml"]) == 0
        main(["rl", "run.toml", "--run-dir", "run", "--max-steps", "1"])
        metrics = train_lines(folder / "run")[0]["metrics"]
    assert "Unclosed" not in caplog.text
    failed = metrics["rollouts/failed"]
    assert 0 < failed < 8
    assert metrics["errors/judge"] == metrics["judge/failed"] == failed
    assert metrics["judge/requests"] + metrics["judge/cached"] >= 8
    assert metrics["judge/requests"] == len(server.requests)
    assert metrics["judge/cost"] == pytest.approx(metrics["judge/prompt_tokens"] / 1e6)
    assert "reward_part/judged/quality/mean" in metrics


def test_an_environment_of_ones_own_may_be_named_with_its_arguments(monkeypatch, tmp_path):
    with chat_server(said('{"quality": 10}')) as server:
        environment = create_environment(
            "judged",
            {
                "environment": "single_turn",
                "args": {"data": [{"prompt": "Hi?"}]},
                "judge": {"model": "m", "base_url": server.url},
            },
        )
        (trajectory,) = play(environment, answer="Hello")
    assert trajectory.reward == 1.0
