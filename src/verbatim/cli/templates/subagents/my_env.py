"""An environment with two agents, a gardener and a scout. Only the scout sees the plant; the gardener asks the scout,
and decides what to do. The model plays both agents, and both are trained.

An environment consists of messages, tools and a reward, never of token ids. Replace the plants by your own task, and
run `verbatim env check my_env:MyEnv` after each change.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from verbatim import Example, Message, Trajectory
from verbatim.environments import Agent, Demonstration, Episode, FunctionTool, tool_call, tool_exchange

SIGNS = {"cracked soil": "dry", "yellow leaves": "pale", "hanging stems": "wilting", "roots outside": "crowded"}
"""What the scout sees, and the word that describes it."""
RIGHT_CARE = {"dry": "water", "pale": "feed", "wilting": "shade", "crowded": "repot"}
"""The scout's word, and the gardener's right answer to it."""


def ask() -> str:
    """Ask the scout how the plant is."""
    raise NotImplementedError("the episode answers this call itself, with a turn of the scout")


class MyEpisode(Episode):
    """One episode. Everything that changes while it runs belongs here, so that episodes do not share it."""

    def __init__(self, sign: str) -> None:
        self.sign, self.answer, self.num_asked = sign, "", 0
        # The messages that the first agent reads first. The other agents get their own messages in `run`.
        self.messages = [{"role": "user", "content": f"What to do? {', '.join(RIGHT_CARE.values())}."}]
        self.ask = FunctionTool(ask)

    def for_the_scout(self) -> list[Message]:
        """Return the messages that the scout reads. Its conversation is separate from the gardener's."""
        return [{"role": "user", "content": f"You see {self.sign}. {', '.join(RIGHT_CARE)}?"}]

    async def run(self, agent: Agent) -> None:
        """Run the episode. This is the episode's own control flow: each `agent.sample` is a turn of the named agent."""
        messages = list(self.messages)
        while True:
            said = await agent.sample(messages, [self.ask], agent="gardener")
            messages.append(said)
            calls = said.get("tool_calls", [])
            if not calls:
                self.answer = said["content"].strip()
                return
            for call in calls:
                self.num_asked += 1
                heard = await agent.sample(self.for_the_scout(), agent=f"scout/{self.num_asked}")
                name = call["function"]["name"]
                messages.append({"role": "tool", "content": heard["content"], "tool_call_id": call["id"], "name": name})

    async def score(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return the reward of all agents as named parts, whose sum is the reward. A sum of 1 counts as a success."""
        return {
            "right": 0.9 * (self.answer == RIGHT_CARE[SIGNS[self.sign]]),
            "asked": 0.1 * (self.num_asked > 0),
        }

    def solution(self) -> list[Message]:
        """Return the messages of perfect agents, in the order of their turns. `verbatim env check` plays them."""
        word = SIGNS[self.sign]
        return [
            tool_call("ask", {}),
            {"role": "assistant", "content": word},
            {"role": "assistant", "content": RIGHT_CARE[word]},
        ]


class MyEnv:
    """The environment: provides examples, and starts an episode for each."""

    def examples(self, split: str) -> list[Example]:
        """Return the tasks of "train" or "eval". If you have many tasks, hold some out for "eval"."""
        return [Example(id=sign.replace(" ", "-"), payload={"sign": sign}) for sign in SIGNS]

    async def start(self, example: Example, seed: int) -> MyEpisode:
        """Start a new episode. If anything in it is random, draw it from random.Random(seed)."""
        return MyEpisode(example.payload["sign"])

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return conversations to imitate before reinforcement learning. Only a model made by [model.build] needs them.

        They show the format of each agent's messages, but not good play: the gardener asks half of the time, and both
        agents often guess.
        """
        rng = random.Random(seed)
        return [self._of_the_gardener(rng) if n % 2 == 0 else self._of_the_scout(rng) for n in range(count)]

    def _of_the_gardener(self, rng: random.Random) -> Demonstration:
        episode = MyEpisode(rng.choice(list(SIGNS)))
        messages = list(episode.messages)
        care = rng.choice(list(RIGHT_CARE.values()))
        if rng.random() < 0.5:
            heard = rng.choice(list(RIGHT_CARE))
            messages += tool_exchange("ask", {}, heard)
            care = RIGHT_CARE[heard] if rng.random() < 0.5 else care
        messages.append({"role": "assistant", "content": care})
        return Demonstration(messages=messages, tools=[episode.ask.schema])

    def _of_the_scout(self, rng: random.Random) -> Demonstration:
        episode = MyEpisode(rng.choice(list(SIGNS)))
        word = SIGNS[episode.sign] if rng.random() < 0.5 else rng.choice(list(RIGHT_CARE))
        said: Message = {"role": "assistant", "content": word}
        return Demonstration(messages=[*episode.for_the_scout(), said])
