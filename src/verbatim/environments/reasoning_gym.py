"""The environment `reasoning_gym`: the package `reasoning-gym` generates the questions and scores the answers."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import ComponentError, NoDemonstrations, UsageError
from verbatim.core.imports import is_installed
from verbatim.core.texts import error_text, nearest
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, Reply, check_split
from verbatim.environments.global_random import OwnRandom

INSTALL = "pip install 'verbatim-rl[environments]'"
HASHED = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Names of the tasks whose questions depend on the iteration order of sets. That order differs between processes unless
PYTHONHASHSEED is set."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """A task of reasoning-gym (0.1). The model answers a question in <answer> tags, and the package scores the answer
    from 0 to 1.

    Example i is `create_dataset(task, seed=seed, size=num_train + num_eval, **params)[i]` of the package. The last
    `num_eval` examples are held out for evaluation. They belong to the same data set and seed because the package draws
    item i with `seed + i`, so that a data set with a different seed would share items with the training tasks.

    Raises:
        UsageError: the package is not installed, the task does not exist, or the task needs PYTHONHASHSEED, which is
            not set.
        ComponentError: the package refuses the parameters.
    """

    task: str
    """Name of the task in the package, such as "chain_sum". `verbatim env list reasoning_gym` lists the names."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the task, such as `{ min_terms = 2 }`."""
    seed: int = 0
    """The seed that the package gets."""
    num_train: int = 500
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks."""
    system_prompt: str = "default"
    """Name of one of the package's system prompts ("default", "simple", "direct", ...), or the text of a system prompt;
    "" for none."""
    tag: str = "answer"
    """Name of the tags around the answer. If there are several pairs of tags, the last pair counts; if there is no
    pair, the answer is scored as missing."""
    _dataset: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_task(self.task)
        if self.num_train < 1 or self.num_eval < 1:
            raise UsageError(
                f"reasoning_gym: num_train = {self.num_train}, num_eval = {self.num_eval}; expected at least 1 of each"
            )
        if self.task in HASHED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
            raise UsageError(
                f"reasoning_gym: the questions of {self.task!r} depend on the order of Python's sets, so each process "
                "would generate different ones; start with PYTHONHASHSEED=0 in the environment"
            )
        given = {"seed", "size"} & self.params.keys()
        if given:
            raise UsageError(
                f"reasoning_gym: params has {', '.join(sorted(given))}; instead, give the environment the arguments "
                "seed, num_train and num_eval"
            )
        object.__setattr__(self, "_dataset", self._make())  # the dataclass is frozen

    def _make(self) -> Any:
        import reasoning_gym

        size = self.num_train + self.num_eval
        try:
            return reasoning_gym.create_dataset(self.task, seed=self.seed, size=size, **self.params)
        except (TypeError, ValueError, AssertionError) as error:
            raise ComponentError(
                f"reasoning_gym: the package refuses {dict(self.params)} for {self.task!r}: {error_text(error)}"
            ) from error

    @staticmethod
    def listing() -> list[tuple[str, str]]:
        """Return the name and the kind of each task; empty if the package is not installed."""
        if not is_installed("reasoning_gym"):
            return []
        from reasoning_gym.factory import DATASETS

        return [
            (name, cls.__module__.split(".")[1] + (", needs PYTHONHASHSEED" if name in HASHED else ""))
            for name, (cls, _) in sorted(DATASETS.items())
            if name != "composite"
        ]

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split as examples. The two splits have no task in common."""
        check_split("reasoning_gym", split)
        size = self.num_train + self.num_eval
        indices = range(self.num_train) if split == "train" else range(self.num_train, size)
        return [Example(id=f"{self.task}-{index}", payload={"index": index}) for index in indices]

    def entry(self, index: int) -> dict[str, Any]:
        """Return the package's entry with this index: a dict with "question", "answer" and "metadata"."""
        with OwnRandom(self.seed + index).lent():  # two of the tasks draw from the global generators
            entry: dict[str, Any] = self._dataset[index]
        return entry

    def score(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        """Return the package's score of an answer, from 0 to 1. If there is no answer, `answer` is None."""
        return float(self._dataset.score_answer(answer, entry))

    async def start(self, example: Example, seed: int) -> Question:
        """Start an episode that asks the example's question. `seed` is unused."""
        entry = await asyncio.to_thread(self.entry, int(example.payload["index"]))
        return Question(self, entry) if entry["answer"] is None else AnsweredQuestion(self, entry)

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return randomly drawn training questions, each with the package's answer.

        Raises:
            NoDemonstrations: the task's questions come without answers.
        """
        if self.entry(0)["answer"] is None:
            raise NoDemonstrations(
                f"reasoning_gym: the questions of {self.task!r} come without answers, so there is "
                "nothing to demonstrate; for a warm start give warm_start.data"
            )
        rng = random.Random(seed)
        questions = [AnsweredQuestion(self, self.entry(rng.randrange(self.num_train))) for _ in range(count)]
        return [Demonstration(messages=[*question.messages, *question.solution()]) for question in questions]

    def system_messages(self) -> list[Message]:
        """Return the system prompt as a list of one message; an empty list if the prompt is empty."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        text = SYSTEM_PROMPTS.get(self.system_prompt, self.system_prompt)
        return [{"role": "system", "content": text}] if text else []


class Question(Episode):
    """An episode with one question and one answer to it."""

    def __init__(self, environment: ReasoningGym, entry: Mapping[str, Any]) -> None:
        self._environment, self._entry = environment, entry
        self._score: float | None = None
        self.info = {"task": environment.task}
        self.messages = [*environment.system_messages(), {"role": "user", "content": str(entry["question"])}]

    async def reply(self, message: Message) -> Reply:
        """Read and score the answer, which ends the episode. If the package's scorer raises an exception, the score is
        0 and `info["score_error"]` has the reason."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(message["content"], tag_name=self._environment.tag)
        try:
            self._score = await self._scored(answer)
        except Exception as error:  # noqa: BLE001  a hundred scorers parse the model's text, and each may raise anything
            self._score = 0.0
            self.info = {**self.info, "score_error": error_text(error)}
        return Reply(done=True)

    async def score(self, trajectory: Trajectory) -> float:
        """Return the package's score. An episode that was cut off is scored as a missing answer."""
        return await self._scored(None) if self._score is None else self._score

    async def _scored(self, answer: str | None) -> float:
        # In a thread, because some scorers take long and would block the event loop.
        return await asyncio.to_thread(self._environment.score, answer, self._entry)


class AnsweredQuestion(Question):
    """A question to which the package knows the answer."""

    def solution(self) -> list[Message]:
        """Return the package's answer, as the model should write it."""
        tag = self._environment.tag
        return [{"role": "assistant", "content": f"<{tag}>{self._entry['answer']}</{tag}>"}]


def _check_task(task: str) -> None:
    if not is_installed("reasoning_gym"):
        raise UsageError(f"reasoning_gym needs the package reasoning-gym: {INSTALL}")
    names: Iterable[str] = [name for name, _ in ReasoningGym.listing()]
    if task not in names:
        hint = nearest(task, names) or "."
        raise UsageError(
            f"reasoning_gym: the package has no task {task!r}{hint} `verbatim env list reasoning_gym` shows them"
        )
