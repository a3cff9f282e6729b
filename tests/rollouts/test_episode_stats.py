"""What fails is said when it happens, once for each kind, and counted to the end."""

from __future__ import annotations

import asyncio

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from verbatim import Example
from verbatim.environments.environment import Episode
from verbatim.environments.tools import FunctionTool, ToolFailed
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, EpisodeStats, GroupRun, RolloutSetup
from verbatim.rollouts.episode_stats import failure_kind


def look_up(key: str) -> str:
    """Look something up."""
    if key == "meant":
        raise ToolFailed("there is no such key")
    return {"known": "value"}[key]


class Asking(Episode):
    messages = ({"role": "user", "content": "go"},)
    tools = (FunctionTool(look_up, inline=True),)

    async def score(self, trajectory):
        return 0.0


class Questions:
    def examples(self, split):
        return [Example(id="q")]

    async def start(self, example, seed):
        return Asking()


async def play(environment, script, size=3):
    left = [list(completions) for completions in script]
    sampler = ScriptedSampler(
        script=lambda request: next(c for c in left if c).pop(0), vocab_size=VOCAB_SIZE, context_length=1000
    )
    episode_stats = EpisodeStats("train")
    setup = RolloutSetup(
        env="questions",
        environment=environment,
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        slots=asyncio.Semaphore(1),
        episode_stats=episode_stats,
    )
    await GroupRun(setup, Example(id="q"), index=0, size=size, run_seed=0).run()
    return episode_stats


async def test_a_tool_that_always_raises_is_in_the_log_once_with_its_traceback_and_counted(caplog):
    one = [call("look_up", key="a"), call("look_up", key="b"), say("no")]
    episode_stats = await play(Questions(), [one, one, one])
    (said,) = caplog.messages
    assert said.startswith("train episode train-0-0 of environment 'questions', example 'q': look_up failed: KeyError:")
    assert 'return {"known": "value"}[key]' in said  # the line that raised
    assert episode_stats.tool_faults == {"look_up failed: KeyError": 6}
    assert (episode_stats.num_episodes, episode_stats.num_failed) == (3, 0)
    assert episode_stats.summary() == ["tools failed in train episodes: 6 x look_up failed: KeyError"]


async def test_what_a_tool_says_to_the_model_on_purpose_is_no_fault(caplog):
    episode_stats = await play(
        Questions(), [[call("look_up", key="meant"), call("look_up", key="known"), say("x")]], size=1
    )
    assert (caplog.messages, episode_stats.summary()) == ([], [])


async def test_a_group_score_that_raises_is_said_with_its_traceback(caplog):
    class Judged(Questions):
        async def score_group(self, trajectories):
            raise OSError("the judge is away")

    episode_stats = await play(Judged(), [[say("x")]] * 3)
    assert episode_stats.summary() == ["3 of 3 train episodes failed: 3 x environment: score_group raised OSError"]
    (said,) = caplog.messages
    assert 'raise OSError("the judge is away")' in said


@pytest.mark.parametrize("scores", [["1"], ["0.5"] * 3, [b"1"] * 3])
async def test_a_group_score_that_is_a_text_is_refused(scores):
    class Judged(Questions):
        async def score_group(self, trajectories):
            return scores

    episode_stats = await play(Judged(), [[say("x")]] * 3)
    assert episode_stats.num_failed == 3


def test_failures_of_one_kind_differ_in_numbers_and_quoted_values_only():
    assert failure_kind("environment: score raised KeyError: 'a'") == "environment: score raised KeyError"
    assert failure_kind("environment: score returned 'yes'; expected") == failure_kind(
        "environment: score returned 'no'; expected"
    )
    assert failure_kind("record: turn 3: logprobs: 4 for 5") == "record: turn #"
    assert failure_kind("reward: missing") == "reward: missing"
