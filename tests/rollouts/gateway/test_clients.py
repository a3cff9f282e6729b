"""Agents on other people's SDKs, unmodified, against the gateway with a scripted model.

They run in an environment of their own (`make test-clients`), since their packages pin each other's versions. Each is a
program in clients/; what it sampled is recorded once, and a conversation that only goes on is one training sample.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lost_messages import renderer_of, sampler_for
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.sampling import SamplingParams
from verbatim.inspection.envcheck.play import SilentStats
from verbatim.inspection.envcheck.program_check import ProgramReport, check_program
from verbatim.rollouts.gateway.program.environment import Program
from verbatim.rollouts.group import GroupRun
from verbatim.rollouts.runner import RolloutSetup
from waiting import until

pytestmark = [pytest.mark.clients, pytest.mark.realtime]
CLIENTS = Path(__file__).parent / "clients"
PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")


def installed(path: str) -> str:
    """A program of the environments that `make test-clients` makes."""
    folder = os.environ.get("VERBATIM_CLIENTS")
    assert folder, "these tests need VERBATIM_CLIENTS, the folder that `make test-clients` installs the clients in"
    assert Path(folder, path).exists(), f"{path} is not installed in VERBATIM_CLIENTS = {folder}"
    return str(Path(folder, path))


def check(
    program: str,
    said: Sequence[Mapping[str, Any]] = (),
    *,
    environment: str = "agents",
    reasoning: bool = False,
    **example: object,
) -> ProgramReport:
    python = installed(f"{environment}/bin/python") if environment else sys.executable
    variables = {} if environment else {"CODEX": installed("node/node_modules/.bin/codex")}
    # A sub-agent of codex may still be listening when its program ends.
    played = Program(
        [python, program],
        [{"id": "0", **example}],
        cwd=str(CLIENTS),
        sandbox=False,
        timeout=300.0,
        env=variables,
        train_undelivered=True,
    )
    report = check_program(played, said, reasoning=reasoning, seconds=300.0)
    assert report.error is None, report.error
    assert report.num_sampled_tokens == report.num_trained_tokens > 0
    assert report.num_differences == 0
    assert not [name for name in report.counts if name.startswith("refused/")]
    return report


def calling(name: str, content: str = "", **arguments: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("program", "example", "num_turns"),
    [
        ("anthropic_loop.py", {}, 2),
        ("anthropic_loop.py", {"stream": True}, 2),
        ("openai_agents_sdk.py", {"api": "responses"}, 4),
        ("openai_agents_sdk.py", {"api": "chat_completions"}, 4),
        ("langgraph_agent.py", {}, 4),
        ("langgraph_agent.py", {"stream": True}, 4),
        ("pydantic_ai_agent.py", {"model": "openai-chat:gpt-4o"}, 3),
        ("pydantic_ai_agent.py", {"model": "openai-responses:gpt-4o"}, 3),
    ],
)
def test_a_conversation_that_only_goes_on_is_one_sample(program: str, example: dict[str, object], num_turns: int):
    report = check(program, **example)
    assert (report.num_turns, report.num_samples, report.branches) == (num_turns, 1, [])
    assert report.reward == 1.0


def test_how_langgraph_and_pydantic_ai_write_answers_down_is_told():
    assert check("langgraph_agent.py").rewritten == {0: ["content null"], 1: ["content null"]}
    report = check("pydantic_ai_agent.py", model="openai-chat:gpt-4o")
    assert report.rewritten == {0: ["content null", "arguments of add with different white space"]}


@pytest.mark.parametrize("example", [{}, {"stream": True}, {"model": "anthropic/claude-sonnet-4-5"}])
def test_litellm_is_one_sample(example: dict[str, object]):
    report = check("litellm_loop.py", environment="litellm", **example)
    assert (report.num_turns, report.num_samples, report.branches, report.reward) == (2, 1, [], 1.0)


def test_the_break_of_a_stream_that_litellm_puts_together_for_anthropic_is_explained():
    """It writes a sentence of its own in the place of an empty text."""
    report = check("litellm_loop.py", environment="litellm", stream=True, model="anthropic/claude-sonnet-4-5")
    assert (report.num_turns, report.num_samples, report.reward) == (2, 2, 1.0)
    assert [(b["reason"], b["found"]) for b in report.branches] == [
        ("history_edited", "message 2, an answer, differs from the sampled one")
    ]


def in_text(command: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"I act.\n```mswea_bash_command\n{command}\n```"}


DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("litellm", [calling("bash", "I look.", command="echo 42"), calling("bash", command=DONE)]),
        ("litellm_response", [calling("bash", "I look.", command="echo 42"), calling("bash", command=DONE)]),
        ("litellm_textbased", [in_text("echo 42"), in_text(DONE)]),
    ],
)
def test_mini_swe_agent_is_one_sample(kind: str, said: list[dict[str, Any]]):
    report = check("mini_swe_agent.py", said, environment="litellm", kind=kind)
    assert (report.num_turns, report.num_samples, report.branches, report.reward) == (2, 1, [], 1.0)


@pytest.mark.parametrize("reasoning", [False, True])
def test_codex(reasoning: bool):
    """It runs a command and starts a sub-agent, whose conversation is a branch."""
    said = [
        calling("exec_command", cmd="echo 42 > out.txt; cat out.txt"),
        calling("multi_agent_v1__spawn_agent", message="Say a word."),
        {"role": "assistant", "content": "The scripted model is done."},
    ]
    report = check("codex.py", said, environment="", reasoning=reasoning)
    assert (report.num_turns, report.num_samples, report.reward) == (4, 2, 1.0)
    (branch,) = report.branches
    assert (branch["agent"], branch["reason"]) == ("sub/1", "sub_agent")


def test_each_break_of_smolagents_is_explained():
    """It writes its calls and their answers as text, so that no request goes on where one ended."""
    report = check("smolagents_agent.py")
    assert report.num_turns == report.num_samples == len(report.branches) + 1
    assert {b["reason"] for b in report.branches} <= {"history_edited", "sub_agent", "compaction"}
    assert report.counts["unenforced/tool_choice"] > 0


@pytest.mark.parametrize(
    ("environment", "name", "text"),
    re.findall(r"^```python\n# (\w+): (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL),
)
def test_the_programs_of_the_page_are_recorded(environment: str, name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    report = check(str(tmp_path / name), environment=environment)
    assert (report.num_turns, report.num_samples, report.branches, report.reward) == (1, 1, [], 1.0)


class Requests:
    """Keeps the bodies of requests as clients wrote them."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, Any]] = []

    def placed(self, request: Any, body: Mapping[str, Any], turns: Mapping[int, int]) -> None:
        self.bodies.append(body)

    def answered(self, request: Any, reply: Any, turn: int) -> None:
        pass


def texts_of(body: Mapping[str, Any]) -> list[str]:
    """Instructions and messages of a request that holds no turn yet, in order."""
    contents = [body.get("instructions"), *(item.get("content") for item in body.get("input") or body["messages"])]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    return [part["text"] if isinstance(part, dict) else part for part in parts if part]


@pytest.mark.parametrize("template", ["gptoss", "qwen3_5_think"])
@pytest.mark.parametrize(
    ("program", "example", "least"),
    [
        ("codex.py", {}, 4),
        ("mini_swe_agent.py", {"kind": "litellm"}, 2),
        ("mini_swe_agent.py", {"kind": "litellm_response"}, 2),
    ],
)
async def test_all_instructions_of_a_coding_agent_are_in_the_prompt(program, example, least, template):
    """Some are system or developer messages behind the first one, which most templates leave out or refuse."""
    python = sys.executable if program == "codex.py" else installed("litellm/bin/python")
    variables = {"CODEX": installed("node/node_modules/.bin/codex")} if program == "codex.py" else {}
    played = Program(
        [python, program], [{"id": "0", **example}], cwd=str(CLIENTS), sandbox=False, timeout=300.0, env=variables
    )
    played.watch = requests = Requests()
    renderer = renderer_of(template)
    sampler = sampler_for(renderer)
    setup = RolloutSetup(
        env="program",
        environment=played,
        sampler=sampler,
        renderer=renderer,
        slots=asyncio.Semaphore(1),
        params=SamplingParams(max_tokens=64),
        episode_stats=SilentStats(),
        limits=EpisodeLimits(max_turns=2, max_context=100_000, timeout=310.0),
    )
    run = asyncio.create_task(GroupRun(setup, played.examples("train")[0], index=0, size=1, run_seed=0).run())
    await until(lambda: run.done() or (requests.bodies and sampler.requests))
    run.cancel()
    await asyncio.wait([run])
    prompt = renderer.decode(sampler.requests[0].prompt_ids)
    texts = texts_of(requests.bodies[0])
    assert len(texts) >= least
    place = 0
    for text in texts:
        assert prompt.count(text.strip()) == 1, text[:200]
        place = prompt.index(text.strip(), place)
