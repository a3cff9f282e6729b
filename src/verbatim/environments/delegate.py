"""The environment `delegate`: a main agent asks a sub-agent, and only the sub-agent sees the notes. So an episode has
two contexts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Agent, Demonstration, Episode, check_split, tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool

COLOURS = ("red", "blue", "green", "black", "white", "amber")
MISREADS = 0.4
"""Probability that a demonstration gives a random number. Also the probability that it asks for a random box."""
DELEGATION_SHARE = 0.1
"""Share of the reward that the agent gets for calling `ask` at all."""


@dataclass(frozen=True, kw_only=True)
class Delegate:
    """The user asks the main agent for the number in a box. Only the notes have the number, and only a sub-agent gets
    the notes: the main agent calls `ask(box)`, a sub-agent reads the notes and answers, and that answer becomes the
    result of the tool call. The main agent never sees the sub-agent's conversation.

    The reward has the parts `correct`, 0.9 for the right number, and `delegated`, 0.1 for calling `ask`.

    Raises:
        UsageError: there are no boxes, or more boxes than colours.
    """

    num_boxes: int = 3
    """Number of boxes in the notes."""
    num_train: int = 300
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks. All of them differ from the training tasks."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_boxes <= len(COLOURS):
            raise UsageError(f"delegate: num_boxes = {self.num_boxes}; expected 1 to {len(COLOURS)}")

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split. The two splits have no task in common."""
        check_split("delegate", split)
        rng = random.Random("delegate")  # a fixed seed: both splits are cut from the same sequence of tasks
        drawn: dict[str, Example] = {}  # by id, so that a task generated twice counts once
        while len(drawn) < self.num_train + self.num_eval:
            notes, box = self._draw(rng)
            text = "-".join(f"{colour}{number}" for colour, number in notes.items())
            drawn[f"{box}-of-{text}"] = Example(id=f"{box}-of-{text}", payload={"notes": notes, "box": box})
        tasks = list(drawn.values())
        return tasks[: self.num_train] if split == "train" else tasks[self.num_train :]

    def _draw(self, rng: random.Random) -> tuple[dict[str, int], str]:
        notes = {colour: rng.randint(1, 9) for colour in rng.sample(COLOURS, self.num_boxes)}
        return notes, rng.choice(list(notes))

    async def start(self, example: Example, seed: int) -> Delegation:
        """Start an episode with a question about the example's notes."""
        return Delegation(dict(example.payload["notes"]), str(example.payload["box"]))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return demonstrations that alternate between the main agent's conversation and the sub-agent's."""
        rng = random.Random(seed)
        return [self._demonstration(rng, main=n % 2 == 0) for n in range(count)]

    def _demonstration(self, rng: random.Random, *, main: bool) -> Demonstration:
        notes, box = self._draw(rng)
        task = Delegation(notes, box)
        number = rng.randint(1, 9) if rng.random() < MISREADS else notes[box]
        if not main:
            messages = [*task.notes_for(box), Message(role="assistant", content=str(number))]
            return Demonstration(messages=messages)
        asked = rng.choice(COLOURS) if rng.random() < MISREADS else box
        asking = tool_exchange("ask", {"box": asked}, str(number))
        messages = [*task.messages, *asking, Message(role="assistant", content=str(number))]
        return Demonstration(messages=messages, tools=[task.ask.schema])


class Delegation(Episode):
    """An episode with one question. It has its own control flow, because two agents take part."""

    def __init__(self, notes: Mapping[str, int], box: str) -> None:
        self._notes, self._box = notes, box
        self._answer, self._num_asked = "", 0
        self.messages = [{"role": "user", "content": f"Which number is in the {box} box?"}]
        self.ask = FunctionTool(_ask, name="ask", description="Ask somebody who knows.")

    def notes_for(self, box: str) -> list[Message]:
        """Return the opening messages of the sub-agent that is asked about this box."""
        text = ", ".join(f"{colour} {number}" for colour, number in self._notes.items())
        return [{"role": "user", "content": f"Notes: {text}. Only the number in the {box} box."}]

    async def run(self, agent: Agent) -> None:
        """Sample turns of the main agent until it answers. Each call of `ask` starts a new sub-agent."""
        messages = list(self.messages)
        while True:
            answer = await agent.sample(messages, [self.ask], agent="main")
            messages.append(answer)
            calls = answer.get("tool_calls", [])
            if not calls:
                self._answer = answer["content"].strip()
                return
            for call in calls:
                arguments = call["function"]["arguments"]
                box = arguments.get("box") if isinstance(arguments, Mapping) else None
                self._num_asked += 1
                if call["function"]["name"] == "ask" and isinstance(box, str):
                    sub_answer = await agent.sample(self.notes_for(box), agent=f"sub/{self._num_asked}")
                    content = sub_answer["content"]
                else:
                    content = 'Error: call ask with {"box": "colour"}.'
                messages.append({"role": "tool", "content": content, "tool_call_id": call["id"], "name": "ask"})

    def solution(self) -> list[Message]:
        """Return three messages: the main agent's call, the sub-agent's answer, and the main agent's answer."""
        number: Message = {"role": "assistant", "content": str(self._notes[self._box])}
        return [tool_call("ask", {"box": self._box}), number, number]

    async def score(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return the parts of the reward, for the right number and for asking."""
        return {
            "correct": (1 - DELEGATION_SHARE) * (self._answer == str(self._notes[self._box])),
            "delegated": DELEGATION_SHARE * (self._num_asked > 0),
        }


def _ask(box: str) -> str:
    raise NotImplementedError("answered by a sub-agent")
