"""The programs of docs/gateway.md run as they are shown."""

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from waiting import HANGS

pytestmark = pytest.mark.realtime

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
QUESTION = {"question": "Who wrote Emma?", "answer": "Austen"}


def snippet(name: str) -> str:
    (text,) = re.findall(rf"^```python\n(# {name}\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


def sampler():
    return ScriptedSampler(
        script=lambda request: np.array(say("Jane Austen."), np.int32), vocab_size=VOCAB_SIZE, context_length=1000
    )


@pytest.mark.slow
async def test_the_program_of_the_page_is_played(tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(snippet("my_agent.py"))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(QUESTION) + "\n")
    environment = create_environment(
        "program",
        {
            "command": ["{python}", "my_agent.py"],
            "data": str(tmp_path / "tasks.jsonl"),
            "cwd": str(tmp_path),
            "sandbox": False,
        },
    )
    setup = RolloutSetup(
        env="program",
        environment=environment,
        sampler=sampler(),
        renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=100),
        slots=asyncio.Semaphore(1),
        limits=EpisodeLimits(max_context=1000, timeout=4 * HANGS),
    )
    (trajectory,) = (
        await GroupRun(setup, environment.examples("train")[0], index=0, size=1, run_seed=0).run()
    ).trajectories
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)


@pytest.mark.slow
async def test_the_agent_in_the_same_process_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in_process.py").write_text(snippet("in_process.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "in_process", raising=False)
    from in_process import play  # type: ignore[import-not-found]

    trajectory = await play(sampler(), ByteRenderer(), QUESTION["question"], QUESTION["answer"])
    assert (trajectory.example_id, trajectory.reward) == ("Who wrote Emma?", 1.0)
    assert [message["content"] for message in trajectory.messages] == ["Who wrote Emma?", "Jane Austen."]
