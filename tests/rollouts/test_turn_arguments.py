"""What an environment says of a turn beside its messages is checked where it enters."""

import asyncio
import enum

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example, RolloutIdentity
from verbatim.environments import AgentScores, Episode
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode


class Role(enum.StrEnum):
    CRITIC = "critic"


class Speaks(Episode):
    def __init__(self, given, exact):
        self._given, self._exact = given, exact

    async def run(self, agent):
        if self._exact:
            await agent.complete(np.arange(3, dtype=np.int32), SamplingParams(), **self._given)
        else:
            await agent.sample([{"role": "user", "content": "go"}], **self._given)

    async def score(self, trajectory):
        return AgentScores(agents={self._given.get("agent", "main"): 0.5})


class Environment:
    def __init__(self, given, exact=False):
        self.given, self.exact = given, exact

    def examples(self, split):
        return [Example(id="a")]

    async def start(self, example, seed):
        return Speaks(self.given, self.exact)


def played(given, exact=False):
    sampler = ScriptedSampler(script=[say("a")], vocab_size=VOCAB_SIZE, context_length=1000)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        recorder=Recorder(VOCAB_SIZE),
        seed=0,
    )
    return asyncio.run(
        run_episode(
            environment=Environment(given, exact),
            example=Example(id="a"),
            seed=0,
            loop=loop,
            identity=RolloutIdentity(example_id="a"),
        )
    )


NO_NAMES = (7, None, b"x", 0.5, ["a"], object(), "", "x" * 201)


@pytest.mark.parametrize("agent", NO_NAMES, ids=lambda agent: type(agent).__name__)
@pytest.mark.parametrize("exact", [False, True])
def test_a_name_that_is_none_is_the_environments_error(agent, exact):
    trajectory = played({"agent": agent}, exact)
    assert "expected the agent's name, a string of 1 to 200 characters" in str(trajectory.error)
    assert trajectory.turns == ()


@pytest.mark.parametrize("agent", [Role.CRITIC, np.str_("critic"), "critic"])
def test_a_name_of_another_class_of_texts_is_the_name(agent):
    """So that what an agent earned reaches its turns."""
    trajectory = played({"agent": agent})
    assert trajectory.error is None
    assert [type(turn.agent) for turn in trajectory.turns] == [str]
    assert {turn.agent for turn in trajectory.turns} == set(trajectory.agent_rewards) == {"critic"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"state_key": ["a"]}, "state_key = ['a']; expected a string or None"),
        ({"state_key": "x" * 10_001}, "state_key = a string of 10,001 characters; expected at most 10,000"),
        ({"trained": "no"}, "trained = 'no'; expected True or False"),
        ({"trained": None}, "trained = None; expected"),
    ],
)
def test_a_state_or_a_flag_that_is_none_is_the_environments_error(given, told):
    trajectory = played(given)
    assert told in str(trajectory.error)


def test_numpys_flags_are_flags():
    assert [turn.trained for turn in played({"trained": np.bool_(False)}).turns] == [False]
