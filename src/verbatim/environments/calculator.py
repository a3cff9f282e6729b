"""The environment `calculator`: evaluate an arithmetic expression with tools, after a single user message."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, Reply, check_split, tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool

SLIPS = 0.3
"""Probability that a step of a demonstration picks its tool at random. Also the probability that the answer of a
demonstration is off by at most one."""
TOOL_SHARE = 0.1
"""Share of the reward that the agent gets for calling any tool."""


@dataclass(frozen=True, kw_only=True)
class Calculator:
    """The user asks for `(a + b) * c` or `a * b + c`; the agent calls `add` and `multiply` and answers with the number.

    The reward has the parts `correct`, 0.9 for the right answer, and `used_tools`, 0.1 for calling any tool.

    Raises:
        UsageError: `largest` is too small for `num_train + num_eval` different tasks.
    """

    largest: int = 9
    """Largest number in an expression. The smallest is 1."""
    num_train: int = 300
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks. All of them differ from the training tasks."""

    def __post_init__(self) -> None:
        if 2 * self.largest**3 < self.num_train + self.num_eval:
            raise UsageError(
                f"calculator: num_train = {self.num_train} and num_eval = {self.num_eval} need "
                f"{self.num_train + self.num_eval} tasks, but largest = {self.largest} gives only {2 * self.largest**3}"
            )

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split. The two splits have no task in common."""
        check_split("calculator", split)
        numbers = range(1, self.largest + 1)
        tasks = [(kind, a, b, c) for kind in ("sum", "product") for a in numbers for b in numbers for c in numbers]
        random.Random("calculator").shuffle(tasks)
        chosen = tasks[: self.num_train] if split == "train" else tasks[self.num_train :][: self.num_eval]
        return [
            Example(id=f"{kind}-{a}-{b}-{c}", payload={"kind": kind, "numbers": [a, b, c]}) for kind, a, b, c in chosen
        ]

    async def start(self, example: Example, seed: int) -> Calculation:
        """Start an episode with a question about the example's numbers."""
        return Calculation(str(example.payload["kind"]), *example.payload["numbers"])

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return well-formed demonstrations that sometimes use a wrong tool or number. They are made from training
        tasks only."""
        rng = random.Random(seed)
        tasks = self.examples("train")
        return [self._demonstration(rng, rng.choice(tasks)) for _ in range(count)]

    def _demonstration(self, rng: random.Random, example: Example) -> Demonstration:
        task = Calculation(str(example.payload["kind"]), *example.payload["numbers"])
        messages = list(task.messages)
        value = task.numbers[0]
        for step, (right, other) in enumerate(zip(task.steps, task.numbers[1:], strict=True)):
            name = rng.choice(("add", "multiply")) if rng.random() < SLIPS else right
            arguments = {"a": value, "b": other}
            value = getattr(task, name)(value, other)
            messages += tool_exchange(name, arguments, str(value), call_id=f"call_{step}")
        answer = value + rng.randint(-1, 1) if rng.random() < SLIPS else value
        messages.append({"role": "assistant", "content": str(answer)})
        return Demonstration(messages=messages, tools=[tool.schema for tool in task.tools])


class Calculation(Episode):
    """An episode with one question. Records the agent's calls and its answer."""

    def __init__(self, kind: str, a: int, b: int, c: int) -> None:
        self.numbers = (a, b, c)
        self.steps = ("add", "multiply") if kind == "sum" else ("multiply", "add")
        self.correct = (a + b) * c if kind == "sum" else a * b + c
        self._num_calls = 0
        self._answer = ""
        text = f"({a} + {b}) * {c}" if kind == "sum" else f"{a} * {b} + {c}"
        self.messages = [{"role": "user", "content": f"What is {text}?"}]
        self.tools = (FunctionTool(self.add, inline=True), FunctionTool(self.multiply, inline=True))

    def add(self, a: int, b: int) -> int:
        """a + b"""
        self._num_calls += 1
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """a * b"""
        self._num_calls += 1
        return a * b

    async def reply(self, message: Message) -> Reply:
        """Take the message as the answer, and end the episode, because the message has no tool calls."""
        self._answer = message["content"].strip()
        return Reply(done=True)

    def solution(self) -> list[Message]:
        """Return the messages with the two calls, and the message with the right number."""
        first, second = self.steps
        a, b, c = self.numbers
        between = a + b if first == "add" else a * b
        calls = [tool_call(first, {"a": a, "b": b}), tool_call(second, {"a": between, "b": c}, call_id="call_1")]
        return [*calls, {"role": "assistant", "content": str(self.correct)}]

    async def score(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return the parts of the reward, for the right number and for using tools."""
        return {
            "correct": (1 - TOOL_SHARE) * (self._answer == str(self.correct)),
            "used_tools": TOOL_SHARE * (self._num_calls > 0),
        }
