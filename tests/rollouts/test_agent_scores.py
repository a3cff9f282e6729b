"""Rewards of agents: from `score` to the trajectory, through JSON, and what a group's score does with them."""

import json

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example, RolloutIdentity
from verbatim.core.trajectory_json import plain, trajectory_from_json, trajectory_to_json
from verbatim.environments import AgentScores, Episode
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode


class Duels:
    def __init__(self, score):
        self.score = score

    def examples(self, split):
        return [Example(id="a")]

    async def start(self, example, seed):
        return Duel(self.score)


async def play(score):
    sampler = ScriptedSampler(script=[say("a"), say("b"), say("c")], vocab_size=VOCAB_SIZE, context_length=1000)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        recorder=Recorder(VOCAB_SIZE),
        seed=0,
    )
    return await run_episode(
        environment=Duels(score), example=Example(id="a"), seed=0, loop=loop, identity=RolloutIdentity(example_id="a")
    )


class Duel(Episode):
    """Two agents speak in turn; what they earn is in the payload."""

    def __init__(self, score):
        self._score = score

    async def run(self, agent):
        for name in ("left", "right", "left"):
            await agent.sample([{"role": "user", "content": f"You are {name}."}], agent=name)

    async def score(self, trajectory):
        return self._score


async def test_agents_may_have_rewards_of_their_own():
    score = AgentScores(agents={"left": 1.0, "right": -0.5}, reward={"length": 2.0, "end": 1.0})
    trajectory = await play(score)
    assert trajectory.agent_rewards == {"left": 1.0, "right": -0.5}
    assert (trajectory.reward, trajectory.reward_parts) == (3.0, {"length": 2.0, "end": 1.0})
    assert [turn.agent for turn in trajectory.turns] == ["left", "right", "left"]


async def test_without_a_reward_of_the_episode_it_is_the_mean_of_the_agents():
    trajectory = await play(AgentScores(agents={"left": 1.0, "right": 0.0}))
    assert (trajectory.reward, trajectory.reward_parts) == (0.5, {})


async def test_where_no_agent_is_main_the_conversation_is_that_of_the_first():
    score = AgentScores(agents={"left": 0.0})
    trajectory = await play(score)
    assert [m["content"] for m in trajectory.messages] == ["You are left.", "c"]


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        ({}, "expected {agent: number}"),
        ([1.0], "expected {agent: number}"),
        ({"left": "1"}, "score, for the agents, returned"),
        ({"left": float("nan")}, "expected a finite number"),
    ],
)
async def test_rewards_of_agents_that_are_no_numbers_fail_the_episode(agents, said):
    trajectory = await play(AgentScores(agents=agents))
    assert said in trajectory.error


async def test_they_go_through_json():
    trajectory = await play(AgentScores(agents={"left": 1.0, "right": -0.5}))
    written = json.loads(json.dumps(plain(trajectory_to_json(trajectory))))
    assert trajectory_from_json(written).agent_rewards == {"left": 1.0, "right": -0.5}
    assert trajectory["agent_rewards"] == {"left": 1.0, "right": -0.5}
