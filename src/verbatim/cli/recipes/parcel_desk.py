"""A customer asks for a parcel. The agent looks up what happened to it, then has to do the right thing."""

import random

from verbatim import Example, Trajectory
from verbatim.environments import Demonstration, Episode, FunctionTool, ToolResult, tool_exchange

RIGHT_ACTION = {"lost": "refund", "late": "wait", "damaged": "replace", "delivered": "close"}
ACTIONS = list(RIGHT_ACTION.values())


class Case(Episode):
    """One episode: its opening messages, its tools, its reward."""

    def __init__(self, status: str) -> None:
        self.status, self.right = status, False
        self.messages = [{"role": "user", "content": f"Where is my parcel? (Actions: {', '.join(ACTIONS)}.)"}]
        self.tools = [FunctionTool(self.track), FunctionTool(self.act)]

    def track(self) -> str:
        """Look up the parcel."""
        return self.status

    def act(self, action: str) -> ToolResult:
        """Do something about it, which closes the case."""
        self.right = action == RIGHT_ACTION[self.status]
        return ToolResult(content="done", done=True)

    async def score(self, trajectory: Trajectory) -> float:
        return float(self.right)


class ParcelDesk:
    """The environment: examples, an episode about each, and conversations to imitate before training."""

    def examples(self, split: str) -> list[Example]:
        return [Example(id=status, payload={"status": status}) for status in RIGHT_ACTION]

    async def start(self, example: Example, seed: int) -> Case:
        return Case(example.payload["status"])

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """A clerk who knows how to call the tools, looks only half of the time, and then acts at random."""
        rng = random.Random(seed)
        shown = []
        for status in rng.choices(list(RIGHT_ACTION), k=count):
            case = Case(status)
            messages = list(case.messages)
            if rng.random() < 0.5:
                messages += tool_exchange("track", {}, case.track(), call_id="call_0")
            messages += tool_exchange("act", {"action": rng.choice(ACTIONS)}, "done", call_id="call_1")
            shown.append(Demonstration(messages=messages, tools=[tool.schema for tool in case.tools]))
        return shown
