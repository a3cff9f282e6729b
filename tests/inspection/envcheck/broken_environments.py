"""A sound environment, and others that each make one mistake."""

from __future__ import annotations

import asyncio
import random
import threading

from verbatim import Example
from verbatim.environments import Demonstration, Episode, Reply, tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool, ToolResult

COLOURS = ("red", "green", "blue", "black", "white")


class Guess(Episode):
    """The agent asks for a hint, then names the colour."""

    def __init__(self, colour: str, seed: int = 0) -> None:
        self.colour, self.right, self.seed = colour, False, seed
        self.messages = [{"role": "user", "content": f"Which colour? One of {', '.join(COLOURS)}."}]
        self.tools = [FunctionTool(self.hint), FunctionTool(self.name)]

    def hint(self) -> str:
        """The first letter."""
        return self.colour[0]

    def name(self, colour: str) -> ToolResult:
        """Name the colour, which ends the game."""
        self.right = colour == self.colour
        return ToolResult(content="noted", done=True)

    async def score(self, trajectory):
        return float(self.right)

    def solution(self):
        return [tool_call("hint", {}), tool_call("name", {"colour": self.colour}, call_id="call_1")]


class Sound:
    """Nothing is wrong with it. The others are this one with one method changed."""

    episode: type[Guess] = Guess

    def examples(self, split):
        colours = COLOURS[:3] if split == "train" else COLOURS[3:]
        return [Example(id=colour, payload={"colour": colour}) for colour in colours]

    async def start(self, example, seed):
        return self.episode(example.payload["colour"], seed)


class NoExamples(Sound):
    def examples(self, split):
        return []


class NoHeldOut(Sound):
    def examples(self, split):
        return super().examples(split) if split == "train" else []


class SameId(Sound):
    def examples(self, split):
        return [Example(id="one", payload={"colour": colour}) for colour in COLOURS]


class SameTask(Sound):
    def examples(self, split):
        return [Example(id=f"{split}-{number}", payload={"colour": "red"}) for number in range(4)]


class OtherExamples(Sound):
    def examples(self, split):
        return [Example(id=str(n), payload={"colour": random.choice(COLOURS), "n": random.random()}) for n in range(4)]


class OnTheEnvironment(Sound):
    """What one episode hears depends on how many were started before."""

    started = 0

    async def start(self, example, seed):
        type(self).started += 1
        episode = Guess(example.payload["colour"])
        episode.messages = [{"role": "user", "content": f"Game {self.started}. Which colour?"}]
        return episode


class _Appends(Guess):
    history: list[str] = []  # noqa: RUF012  the mistake: one list for all episodes

    def hint(self) -> str:
        """The first letter, and all earlier ones."""
        self.history.append(self.colour[0])
        return ", ".join(self.history)


class OnTheClass(Sound):
    episode = _Appends


class _Never(Guess):
    async def score(self, trajectory):
        return 0.1 * self.right


class NeverReached(Sound):
    episode = _Never


class _Same(Guess):
    solution = None  # it does not say how it is solved

    async def score(self, trajectory):
        return 0.5


class AlwaysTheSame(Sound):
    episode = _Same


seen: threading.Event | None = None
"""Set when the check has seen that the loop is held up. None in the other process, which does not look."""


class _Sleeps(Guess):
    def __init__(self, colour, seed=0):
        super().__init__(colour, seed)
        self.tools = [FunctionTool(self.hint), FunctionTool(self.name)]

    async def hint(self) -> str:
        """The first letter, later."""
        if seen is not None:
            seen.wait()  # the mistake
        return self.colour[0]


class Blocks(Sound):
    episode = _Sleeps

    def examples(self, split):
        return super().examples(split)[:1]


class _BlocksForEver(Guess):
    async def reply(self, message):
        threading.Event().wait()  # the mistake
        return Reply(done=True)


class Freezes(Blocks):
    episode = _BlocksForEver


def undescribed(colour: str) -> ToolResult:
    return ToolResult(content="noted", done=True)


class _Bare(Guess):
    def __init__(self, colour, seed=0):
        super().__init__(colour, seed)
        self.tools = [FunctionTool(self.hint), FunctionTool(self.name), FunctionTool(undescribed, name="other")]


class NoDescription(Sound):
    episode = _Bare


class _Long(Guess):
    def __init__(self, colour, seed=0):
        super().__init__(colour, seed)
        self.messages = [{"role": "user", "content": "word " * 2000}]


class LongPrompt(Sound):
    episode = _Long


class _NeverAsks(Guess):
    async def run(self, agent):
        """The task is done before the agent was asked."""


class NeverAsks(Sound):
    episode = _NeverAsks


class _LongAnswer(Guess):
    def hint(self) -> str:
        """A long hint."""
        return self.colour[0] * 20_000


class LongAnswer(Sound):
    episode = _LongAnswer


class _GoesOn(Guess):
    def name(self, colour: str) -> str:
        """Name the colour."""
        self.right = self.right or colour == self.colour
        return "noted"

    async def reply(self, message):
        return Reply(messages=[{"role": "user", "content": "Go on."}])


class NeverEnds(Sound):
    episode = _GoesOn


class _Waits(Guess):
    async def reply(self, message):
        await asyncio.Event().wait()
        return Reply(done=True)


class Hangs(Sound):
    episode = _Waits


class _Raises(Guess):
    def hint(self) -> str:
        """A hint that is not there."""
        return {}["hint"]


class ToolRaises(Sound):
    episode = _Raises


class _ReplyRaises(Guess):
    async def reply(self, message):
        raise KeyError("nothing said")


class ReplyRaises(Sound):
    episode = _ReplyRaises


class _OwnDice(Guess):
    def hint(self) -> str:
        """A letter of the colour."""
        return f"{random.choice(self.colour)}{random.random()}"


class IgnoresTheSeed(Sound):
    episode = _OwnDice


class _ByHash(Guess):
    def __init__(self, colour, seed=0):
        super().__init__(colour, seed)
        self.messages = [{"role": "user", "content": " ".join(set(f"w{n}" for n in range(40)))}]


class OrderOfASet(Sound):
    episode = _ByHash


class _NotANumber(Guess):
    async def score(self, trajectory):
        return 1.0 if self.right else float("nan")


class NotFinite(Sound):
    episode = _NotANumber


class OtherTools(Sound):
    """Demonstrations with the schema of a tool that no episode offers."""

    def demonstrations(self, count, seed):
        case = Guess("red")
        messages = [*case.messages, *tool_exchange("name", {"colour": "red"}, "noted")]
        return [Demonstration(messages=messages, tools=[FunctionTool(undescribed, name="name").schema])] * count


class BadDemonstrations(Sound):
    def demonstrations(self, count, seed):
        return []


class TakesFromTheExample(Sound):
    async def start(self, example, seed):
        return Guess(example.payload.pop("colour", "nothing left"))
