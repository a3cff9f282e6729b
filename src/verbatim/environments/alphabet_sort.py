"""The environment `alphabet_sort`: the user sends names over several turns, and each answer must list all names so far,
sorted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, Reply, check_split

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gina", "Hugo", "Iris", "Jonas", "Kira", "Leo", "Mara", "Nils",
         "Olga", "Paul", "Rosa", "Sven", "Tara", "Uwe", "Vera", "Willi", "Xenia", "Yann", "Zoe")  # fmt: skip
_TOLD = {", ": "separated by commas", "\n": "one on each line"}
"""The words of the system prompt for each separator."""
MISPLACES = 0.3
"""Probability that an answer in a demonstration has a name in a wrong place."""


@dataclass(frozen=True, kw_only=True)
class AlphabetSort:
    """The user sends names in `num_rounds` messages; each answer must list all names so far in alphabetical order,
    separated by commas or one per line. A right answer earns `1 / num_rounds` (reward parts `round_1`, `round_2`, ...).

    Raises:
        UsageError: the settings require no names at all, or more names than `NAMES` has.
    """

    num_rounds: int = 3
    """Number of user messages."""
    names_per_round: int = 2
    """Number of names in each user message."""
    num_train: int = 500
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks. All of them differ from the training tasks."""
    one_per_line: bool = False
    """True to put each name on its own line, False to separate names with commas. With lines, the tokenizer of
    `[model.build]` has one token per name; with commas, some of its tokens span several names."""

    @property
    def separator(self) -> str:
        """The string between two names, in the user's messages and in the answers."""
        return "\n" if self.one_per_line else ", "

    def __post_init__(self) -> None:
        names = self.num_rounds * self.names_per_round
        if self.num_rounds < 1 or self.names_per_round < 1 or names > len(NAMES):
            raise UsageError(
                f"alphabet_sort: num_rounds = {self.num_rounds}, names_per_round = {self.names_per_round}; expected "
                f"at least 1 of each, and at most {len(NAMES)} names in all"
            )

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split. The two splits have no task in common."""
        check_split("alphabet_sort", split)
        rng = random.Random("alphabet_sort")  # a fixed seed: both splits are cut from the same sequence of tasks
        seen: dict[tuple[str, ...], None] = {}  # a dict as an ordered set: a task generated twice counts once
        while len(seen) < self.num_train + self.num_eval:
            seen[tuple(rng.sample(NAMES, self.num_rounds * self.names_per_round))] = None
        drawn = list(seen)
        chosen = drawn[: self.num_train] if split == "train" else drawn[self.num_train :]
        return [Example(id=f"{split}-{n}", payload={"names": list(names)}) for n, names in enumerate(chosen)]

    async def start(self, example: Example, seed: int) -> Sorting:
        """Start a conversation with the example's names."""
        return Sorting(self, list(example.payload["names"]))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return demonstrations that sometimes put a name in a wrong place."""
        rng = random.Random(seed)
        return [self._demonstration(rng) for _ in range(count)]

    def _demonstration(self, rng: random.Random) -> Demonstration:
        game = Sorting(self, rng.sample(NAMES, self.num_rounds * self.names_per_round))
        messages = list(game.messages)
        while True:
            names = sorted(game.said_so_far)
            if rng.random() < MISPLACES:
                names.insert(rng.randrange(len(names)), names.pop(rng.randrange(len(names))))
            messages.append({"role": "assistant", "content": self.separator.join(names)})
            answer = game.answer(messages[-1]["content"])
            messages.extend(answer.messages)
            if answer.done:
                return Demonstration(messages=messages)


class Sorting(Episode):
    """One conversation. Has the names, and knows which of the answers so far were right."""

    turn_rewards_sum_to_reward = True

    def __init__(self, rules: AlphabetSort, names: Sequence[str]) -> None:
        self._separator = rules.separator
        self._rounds = [list(names[i : i + rules.names_per_round]) for i in range(0, len(names), rules.names_per_round)]
        self._right: list[bool] = []
        self.messages = [
            {"role": "system", "content": f"Answer with all names so far, sorted, {_TOLD[self._separator]}."},
            self._next_message(),
        ]

    @property
    def said_so_far(self) -> list[str]:
        """The names that the user has sent so far."""
        return [name for names in self._rounds[: len(self._right) + 1] for name in names]

    async def reply(self, message: Message) -> Reply:
        """Score the answer, and send the next names."""
        return self.answer(message["content"])

    def answer(self, text: str) -> Reply:
        """Same as `reply`, but not async, because `demonstrations` is not async."""
        # rstrip: commas without a space after them are accepted too.
        answered = [name.strip() for name in text.strip().split(self._separator.rstrip(" "))]
        self._right.append(answered == sorted(self.said_so_far))
        share = self._right[-1] / len(self._rounds)
        if len(self._right) == len(self._rounds):
            return Reply(done=True, reward=share)
        return Reply(messages=[self._next_message()], reward=share)

    def solution(self) -> Iterator[Message]:
        """Generate the right answers: each lists all names so far, sorted."""
        for _ in self._rounds:
            yield {"role": "assistant", "content": self._separator.join(sorted(self.said_so_far))}

    async def score(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return a part of the reward for each answer: `1 / num_rounds` if the answer was right, else 0."""
        return {
            f"round_{n + 1}": float(n < len(self._right) and self._right[n]) / len(self._rounds)
            for n in range(len(self._rounds))
        }

    def state_key(self) -> str:
        """Return the number of the round."""
        return f"round {len(self._right) + 1}"

    def _next_message(self) -> Message:
        names = self._rounds[len(self._right)]
        between = "\n" if self._separator == "\n" else " "
        listed = self._separator.join(names)
        return {"role": "user", "content": f"{'Also' if self._right else 'Sort'}:{between}{listed}"}
