"""An environment in which an agent looks after plants with two tools: it looks at a plant, and then cares for it.

An environment consists of messages, tools and a reward, never of token ids. Replace the plants by your own task, and
run `verbatim env check my_env:MyEnv` after each change.
"""

from __future__ import annotations

import random

from verbatim import Example, Message, Trajectory
from verbatim.environments import Demonstration, Episode, FunctionTool, ToolResult, tool_call, tool_exchange

RIGHT_CARE = {"dry": "water", "pale": "feed", "wilting": "shade", "crowded": "repot"}
CARES = list(RIGHT_CARE.values())


class MyEpisode(Episode):
    """One episode. Everything that changes while it runs belongs here, so that episodes do not share it."""

    def __init__(self, state: str) -> None:
        self.state, self.is_right = state, False
        # The messages that the model reads first.
        self.messages = [{"role": "user", "content": f"Look after the plant. Ways to care: {', '.join(CARES)}."}]
        # A tool is a typed function; its docstring is the description that the model reads.
        self.tools = [FunctionTool(self.look), FunctionTool(self.care)]

    def look(self) -> str:
        """Look at the plant."""
        return self.state

    def care(self, way: str) -> ToolResult:
        """Care for the plant in one way, which ends the visit."""
        self.is_right = way == RIGHT_CARE[self.state]
        return ToolResult(content="done", done=True)  # done=True ends the episode

    async def score(self, trajectory: Trajectory) -> float:
        """Return the reward. Called when the episode has ended. A reward of 1 counts as a success."""
        return float(self.is_right)

    def solution(self) -> list[Message]:
        """Return the messages of a perfect agent. `verbatim env check` plays them, to make sure that success is
        possible."""
        return [tool_call("look", {}), tool_call("care", {"way": RIGHT_CARE[self.state]}, call_id="call_1")]


class MyEnv:
    """The environment: provides examples, and starts an episode for each."""

    def examples(self, split: str) -> list[Example]:
        """Return the tasks of "train" or "eval". If you have many tasks, hold some out for "eval"."""
        return [Example(id=state, payload={"state": state}) for state in RIGHT_CARE]

    async def start(self, example: Example, seed: int) -> MyEpisode:
        """Start a new episode. If anything in it is random, draw it from random.Random(seed)."""
        return MyEpisode(example.payload["state"])

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return conversations to imitate before reinforcement learning. Only a model made by [model.build] needs them.

        They show how a tool is called, but not good play: this gardener looks half of the time, then does the right
        thing half of the time, and otherwise does anything.
        """
        rng = random.Random(seed)
        shown = []
        for state in rng.choices(list(RIGHT_CARE), k=count):
            episode = MyEpisode(state)
            messages = list(episode.messages)
            way = rng.choice(CARES)
            if rng.random() < 0.5:
                messages += tool_exchange("look", {}, episode.look(), call_id="call_0")
                way = RIGHT_CARE[state] if rng.random() < 0.5 else way
            messages += tool_exchange("care", {"way": way}, "done", call_id="call_1")
            shown.append(Demonstration(messages=messages, tools=[tool.schema for tool in episode.tools]))
        return shown
