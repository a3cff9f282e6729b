"""The environment `terminal`: in a real shell, find the file that contains a word, and submit the number in it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, check_split, tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool, ToolResult
from verbatim.environments.tools.isolation import SandboxLimits, find_isolation
from verbatim.environments.tools.sandbox import Sandbox

WORDS = ("apple", "birch", "cloud", "daisy", "ember", "flint", "grape", "heron")
NAMES = ("bag.txt", "box.txt", "cup.txt", "den.txt", "jar.txt", "map.txt", "pot.txt", "tin.txt")
NUMBERS = range(10, 50)

LOOKS = 0.25
"""Probability that a demonstration begins by listing the files."""
SLIPS = 0.4
"""Probability that a part of a demonstration (the word, the file or the answer) is drawn at random and so may be
wrong."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The files of one directory, and the word to find in them.

    Example: with the word "birch" and the files `{"cup.txt": ("apple", 17), "map.txt": ("birch", 42)}`, the answer is
    42.
    """

    word: str
    """The word to find. It is in one of the files."""
    files: Mapping[str, tuple[str, int]]
    """The word and the number in each file, keyed by the file's name."""

    @property
    def answer(self) -> int:
        """The number in the file that has the word."""
        return next(number for word, number in self.files.values() if word == self.word)


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """The agent calls `bash(command)` in a sandbox and ends with `submit(answer)`. The right number earns 1, any other
    number 0.

    Raises:
        UsageError: there are no files or more files than names, or no isolation works on this machine and
            `unsafe_allow` is False.
    """

    num_files: int = 4
    """Number of files in each directory."""
    num_train: int = 400
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks. All of them differ from the training tasks."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Resource limits of the sandbox of each episode."""
    unsafe_allow: bool = False
    """True to run the model's commands as the current user, with access to that user's files and network, if no
    isolation works."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_files <= len(NAMES):
            raise UsageError(f"terminal: num_files = {self.num_files}; expected 1 to {len(NAMES)}")
        find_isolation(unsafe_allow=self.unsafe_allow)

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split as examples. Each task is generated with its id as the seed, and the two splits
        have different ids."""
        counts = {"train": self.num_train, "eval": self.num_eval}
        check_split("terminal", split)
        names = [f"{split}-{n}" for n in range(counts[split])]
        return [Example(id=name, payload=asdict(self._task(random.Random(name)))) for name in names]

    async def start(self, example: Example, seed: int) -> TerminalSession:
        """Start a new sandbox with the example's files. `seed` is unused, because nothing in the episode is random."""
        task = Task(**example.payload)
        files = {name: f"{word}\n{number}\n" for name, (word, number) in task.files.items()}
        isolation = find_isolation(unsafe_allow=self.unsafe_allow)
        return TerminalSession(task, await Sandbox.start(self.limits, files, isolation))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return demonstrations in which each step is sometimes wrong, so that only one in three succeeds."""
        rng = random.Random(seed)
        tasks = [self._task(rng) for _ in range(count)]
        made = [(demonstrate(task, rng), TerminalSession(task).tools) for task in tasks]
        return [Demonstration(messages=messages, tools=[tool.schema for tool in tools]) for messages, tools in made]

    def best_constant_policy_success(self) -> float:
        """Return the success rate of the best policy that reads no files."""
        return 1 / len(NUMBERS)

    def _task(self, rng: random.Random) -> Task:
        words, names = rng.sample(WORDS, self.num_files), rng.sample(NAMES, self.num_files)
        numbers = rng.sample(NUMBERS, self.num_files)
        return Task(word=rng.choice(words), files=dict(zip(names, zip(words, numbers, strict=True), strict=True)))


def demonstrate(task: Task, rng: random.Random) -> list[Message]:
    """Create one demonstration, with random errors: maybe list the files, search for the word, read a file, submit."""
    messages = list(TerminalSession(task).messages)

    def call(name: str, heard: str, /, **arguments: Any) -> None:
        messages.extend(tool_exchange(name, arguments, heard, call_id=f"call_{len(messages) // 2 - 1}"))

    if rng.random() < LOOKS:
        call("bash", "\n".join(sorted(task.files)), command="ls")
    word = rng.choice(WORDS) if rng.random() < SLIPS else task.word
    holding = next((name for name, (held, _) in task.files.items() if held == word), None)
    call("bash", holding or "[exit status 1]", command=f"grep -l {word} *")
    name = holding if holding and rng.random() >= SLIPS else rng.choice(list(task.files))
    held, number = task.files[name]
    call("bash", f"{held}\n{number}", command=f"cat {name}")
    answer = rng.choice(NUMBERS) if rng.random() < SLIPS else number
    call("submit", "right" if answer == task.answer else "wrong", answer=answer)
    return messages


class TerminalSession(Episode):
    """One task in one sandbox."""

    def __init__(self, task: Task, sandbox: Sandbox | None = None) -> None:
        self._word, self._answer = task.word, task.answer
        self._sandbox = sandbox
        self._commands: set[str] = set()
        self._correct = False
        self.messages = [
            {"role": "system", "content": "You use a terminal."},
            {"role": "user", "content": f"Submit the number in the file with this word:\n{task.word}"},
        ]
        self.tools = (FunctionTool(self.bash), FunctionTool(self.submit, inline=True))

    async def bash(self, command: str) -> str:
        """Run a command."""
        assert self._sandbox is not None
        self._commands.add(command)
        return (await self._sandbox.run(command)).text

    def submit(self, answer: int) -> ToolResult:
        """Submit the number."""
        self._correct = answer == self._answer
        return ToolResult(content="right" if self._correct else "wrong", done=True)

    def solution(self) -> list[Message]:
        """Return the messages that search for the word and submit the number in its file."""
        search = tool_call("bash", {"command": f"cat $(grep -l {self._word} *)"})
        return [search, tool_call("submit", {"answer": self._answer}, call_id="call_1")]

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Return 1 if the right number was submitted, else 0."""
        return {"correct": float(self._correct)}

    def state_key(self) -> str:
        """Return the commands so far, sorted and without repeats, since their order does not matter."""
        return "\n".join(sorted(self._commands))

    async def close(self) -> None:
        """End the sandbox and delete its files."""
        if self._sandbox is not None:
            await self._sandbox.close()
