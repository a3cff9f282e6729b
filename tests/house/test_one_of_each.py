"""Mechanisms that stand in one place: whoever needs one finds it there, and a fault in it is mended once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import verbatim
from verbatim.config.orchestrator import EnvConfig, OrchestratorConfig, SamplingConfig
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.sampling import SamplingParams
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout
from verbatim.run.rollouts import limits_of

ROOT = Path(verbatim.__file__).parent

PROCESSES = {
    "core/children.py",
    "inference/vllm/keeper.py",  # it is such a process itself, and has nothing but the standard library
}
CALLS = {
    "spawns a process": (
        {"Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "fork", "system", "popen"},
        PROCESSES,
    ),
    "runs a program": ({"subprocess.run", "subprocess.check_output", "subprocess.check_call"}, PROCESSES),
    "ends a group of processes": ({"killpg"}, PROCESSES),
    "asks the kernel to end it with its parent": ({"prctl"}, PROCESSES),
    "serves HTTP": (
        {"uvicorn.Config", "uvicorn.Server", "uvicorn.run", "web.Application", "HTTPServer"},
        {"inference/http/connections.py"},
    ),
    "opens connections to an HTTP server": (
        {"aiohttp.ClientSession", "httpx.Client", "httpx.AsyncClient", "urlopen", "HTTPConnection"},
        {
            "inference/http/client.py",
            "rollouts/gateway/verifiers/harnesses/verbatim_chat.py",  # a program in its own sandbox
        },
    ),
    "reads JSON that a client has sent": ({"parse_json"}, {"inference/http/json_text.py"}),
    "has a model's card": ({"model_list"}, {"inference/http/app.py", "rollouts/gateway/service.py"}),
}
"""Names of functions, and the files that call them."""


def calls_in(source: str) -> Iterator[tuple[int, set[str]]]:
    """Line and possible names of each call: `f` and, of an attribute, `module.f` too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.lineno, {node.func.id}
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = owner.id if isinstance(owner, ast.Name) else ""
                yield node.lineno, {node.func.attr, f"{name}.{node.func.attr}"}


def elsewhere(what: str, sources: dict[str, str]) -> list[str]:
    """Calls in files where they are not expected."""
    names, files = CALLS[what]
    return [
        f"{file}:{line} {what}"
        for file, source in sources.items()
        if file not in files
        for line, called in calls_in(source)
        if called & names
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize("what", CALLS)
def test_it_stands_in_one_place(what: str, sources: dict[str, str]):
    assert elsewhere(what, sources) == []


def test_a_call_elsewhere_is_found():
    source = "import os, subprocess\nsubprocess.run(['ls'])\nos.fork()\nsubprocess.Popen(['ls'])\nrun()\n"
    assert elsewhere("spawns a process", {"run/a.py": source}) == [
        "run/a.py:3 spawns a process",
        "run/a.py:4 spawns a process",
    ]
    assert elsewhere("runs a program", {"run/a.py": source}) == ["run/a.py:2 runs a program"]
    assert elsewhere("runs a program", {"core/children.py": source}) == []


def test_a_limit_of_an_episode_has_one_default():
    env = EnvConfig(id="guess_number")
    orchestrator = OrchestratorConfig(batch_size=2, group_size=2, seq_len=100, train={"env": [env]})
    assert limits_of(orchestrator, env) == EpisodeLimits(max_context=100)
    names = ("max_turns", "tool_timeout", "tool_output_limit", "tool_error", "max_malformed_retries")
    for rollout in (MultiTurnRollout, APIMultiTurnRollout):
        assert [getattr(rollout, name) for name in names] == [getattr(EpisodeLimits, name) for name in names]


def test_tokens_are_drawn_the_same_way_by_default_wherever_it_is_said():
    assert SamplingConfig().params == SamplingParams()
