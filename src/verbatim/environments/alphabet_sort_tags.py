"""The environment `alphabet_sort_tags`: `alphabet_sort` of the package verifiers, with its prompts, settings and
scores."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, Reply, check_split
from verbatim.environments.sources import HuggingFaceExamples, read_json_lines

SEED = 1337420
"""The seed that verifiers uses. With this seed, the tasks are generated in the same order as in verifiers."""
TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")
"""The tag around the list in the first answer, and the tag around the list in each later answer."""
NEW = " // new name!"
"""The mark after each name that came with the latest user message."""
MOST_PASSES = 1000
"""Maximum number of passes over the lists of names while tasks are generated. If these passes do not give enough tasks,
the settings are refused."""
FIRST = ("Ada", "Akira", "Amir", "Anna", "Boris", "Carla", "Chen", "Clara", "David", "Dina", "Elena", "Emil", "Farid",
         "Felix", "Grace", "Hanna", "Hugo", "Ines", "Ivan", "Jonas", "Julia", "Karim", "Kira", "Laura", "Leo", "Lina",
         "Marco", "Maya", "Nadia", "Nils", "Olga", "Oscar", "Paula", "Quentin", "Rosa", "Samir", "Sofia", "Tara",
         "Theo", "Uma", "Vera", "Victor", "Wei", "Xenia", "Yann", "Yuki", "Zoe")  # fmt: skip
LAST = ("Adler", "Baker", "Bauer", "Castro", "Chandra", "Diaz", "Dupont", "Egger", "Fischer", "Garcia", "Gupta",
        "Hansen", "Ito", "Jansen", "Keller", "Kim", "Kumar", "Larsen", "Lopez", "Marin", "Meyer", "Moreau", "Nakamura",
        "Novak", "Olsen", "Park", "Petrov", "Quist", "Rossi", "Sato", "Schmidt", "Silva", "Tanaka", "Ueda", "Vogel",
        "Wagner", "Wang", "Weber", "Xu", "Yilmaz", "Zhang", "Zimmer")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AlphabetSortTags:
    """`alphabet_sort` of the package verifiers: names to sort arrive over several turns, and each answer is a list in
    tags that marks the new names. The reward is the similarity to the right lists, raised to a power.

    Raises:
        UsageError: a minimum is above its maximum, or the lists of names are too short.
    """

    min_turns: int = 1
    """Minimum number of user messages."""
    max_turns: int = 3
    """Maximum number of user messages. The run's own `max_turns` must not be smaller."""
    min_names_per_turn: int = 1
    """Minimum number of names in a message."""
    max_names_per_turn: int = 5
    """Maximum number of names in a message."""
    similarity_power: int = 4
    """Exponent to which the similarity is raised."""
    power_per_turn: bool = True
    """True to raise the similarity of each turn to the power and then take the mean; False to raise the mean to the
    power."""
    names: str | None = None
    """Source of the names: a JSONL file with a list `names` on each line, or the id of a data set with a column `names`
    (verifiers uses "kalomaze/alphabetic-arxiv-authors-it1"); None for made-up names."""
    num_train: int = 500
    """Number of training tasks."""
    num_eval: int = 100
    """Number of evaluation tasks, generated after the training tasks."""
    _tasks: Sequence[Example] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for low, high in (("min_turns", "max_turns"), ("min_names_per_turn", "max_names_per_turn")):
            least, most = getattr(self, low), getattr(self, high)
            if not 1 <= least <= most:
                raise UsageError(f"alphabet_sort_tags: {low} = {least}, {high} = {most}; expected 1 <= {low} <= {high}")
        if self.similarity_power < 1 or self.num_train < 1 or self.num_eval < 1:
            raise UsageError("alphabet_sort_tags: similarity_power, num_train and num_eval must be at least 1")
        drawn = self._drawn(_lists_of(self.names))
        tasks = [Example(id=str(n), payload=payload) for n, payload in zip(range(self._size), drawn, strict=False)]
        object.__setattr__(self, "_tasks", tasks)

    @property
    def _size(self) -> int:
        return self.num_train + self.num_eval

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks of a split. The two splits have no task in common."""
        check_split("alphabet_sort_tags", split)
        return self._tasks[: self.num_train] if split == "train" else self._tasks[self.num_train :]

    async def start(self, example: Example, seed: int) -> TaggedSorting:
        """Start the conversation of an example."""
        return TaggedSorting(self, example.payload)

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return conversations with the right answers. They are made from training tasks only."""
        rng = random.Random(seed)
        shown = [TaggedSorting(self, rng.choice(self.examples("train")).payload) for _ in range(count)]
        return [Demonstration(messages=sorting.demonstrated()) for sorting in shown]

    def _drawn(self, lists: Sequence[Sequence[str]]) -> Iterator[Mapping[str, Any]]:
        """Generate tasks in the same order as verifiers. Each pass over the lists generates new tasks.

        The calls of `rng`, here and in `_task`, must stay in the same order as in verifiers: a different order would
        give different tasks.

        Raises:
            UsageError: no list is long enough, or `MOST_PASSES` passes did not give enough tasks.
        """
        rng = random.Random(SEED)
        for _ in range(MOST_PASSES):
            found = False
            for given in lists:
                names = list(dict.fromkeys(name.replace(" ", "") for name in given))
                num_turns = rng.randint(self.min_turns, self.max_turns)
                counts = [rng.randint(self.min_names_per_turn, self.max_names_per_turn) for _ in range(num_turns)]
                if len(names) >= sum(counts):
                    found = True
                    yield self._task(names, counts, rng)
            if not found:
                break
        raise UsageError("alphabet_sort_tags: no list of names is long enough for so many turns and names")

    def _task(self, names: Sequence[str], counts: Sequence[int], rng: random.Random) -> dict[str, Any]:
        by_first = rng.choice([True, False])
        starts = [sum(counts[:turn]) for turn in range(len(counts))]
        turns = [list(names[start : start + count]) for start, count in zip(starts, counts, strict=True)]
        answers = []
        for number, turn in enumerate(turns):
            known = sorted(names[: starts[number] + counts[number]], key=lambda name: _key(name, by_first))
            answers.append([name + NEW if number and name in turn else name for name in known])
        return {"asked": self._questions(turns, by_first, rng), "answers": answers}

    def _questions(self, turns: Sequence[list[str]], by_first: bool, rng: random.Random) -> list[str]:
        """Return the user's messages. The number of lines in the format's example is drawn from `rng` too."""
        which = "FIRST" if by_first else "LAST"
        asked = []
        for number, turn in enumerate(turns):
            shuffled = list(turn)
            rng.shuffle(shuffled)
            told = f"alphabetical order by {which} name" if number == 0 else f"alphabetically by {which} name"
            what = "Sort these names in" if number == 0 else "Now sort ALL of these names"
            text = f"{what} {told}: {', '.join(shuffled)}\n\n"
            most = self.max_names_per_turn if number == 0 else sum(map(len, turns[: number + 1]))
            lines = rng.randint(self.min_names_per_turn, most)
            marked_after = lines if number == 0 else rng.randint(0, lines - 1)
            if number:
                text += (
                    "These are in addition to the prior list. Mark any NEW names (that weren't in the prior list) "
                    f"with `{NEW.strip()}` at the end."
                )
            if number > 1:
                asked.append(text + " Follow the same format as before.")
                continue
            shown = "\n".join(f"Name{i}{NEW if i > marked_after else ''}" for i in range(1, lines + 1))
            tag = TAGS[min(number, 1)]
            break_before = "\n\n" if number else ""
            asked.append(f"{text}{break_before}Use exactly this format:\n<{tag}>\n{shown}\n</{tag}>")
        return asked


class TaggedSorting(Episode):
    """One conversation: has the user's messages, the right answers, and the similarity of each answer given so far."""

    def __init__(self, rules: AlphabetSortTags, task: Mapping[str, Any]) -> None:
        self._rules, self._asked, self._answers = rules, task["asked"], task["answers"]
        self._similarities: list[float] = []
        self.messages = [{"role": "user", "content": self._asked[0]}]

    async def reply(self, message: Message) -> Reply:
        """Compare an answer with the right answer. Then ask the next question, or end the episode after the last
        question."""
        number = len(self._similarities)
        self._similarities.append(self._similarity(message["content"], number))
        if number + 1 == len(self._asked):
            return Reply(done=True)
        return Reply(messages=[{"role": "user", "content": self._asked[number + 1]}])

    def _similarity(self, text: str, number: int) -> float:
        """Return the similarity of an answer's list to the right list, from 0 to 1. If an answer has several lists, the
        last list counts, provided that each list is better than the list before it; otherwise the similarity is 0."""
        found = re.findall(f"<{TAGS[min(number, 1)]}>(.*?)</{TAGS[min(number, 1)]}>", text, re.DOTALL)
        tries = [similarity(content, self._answers[number]) for content in found]
        improves = all(after > before for before, after in pairwise(tries))
        return tries[-1] if tries and improves else 0.0

    async def score(self, trajectory: Trajectory) -> float:
        """Return the mean of the similarities. The setting `power_per_turn` says whether each similarity or their mean
        is raised to the power. A missing answer counts as 0."""
        power, count = self._rules.similarity_power, len(self._asked)
        if self._rules.power_per_turn:
            return sum(value**power for value in self._similarities) / count
        return float((sum(self._similarities) / count) ** power)

    def solution(self) -> list[Message]:
        """Return the assistant's messages with the right lists."""
        return [_answer(answer, TAGS[min(number, 1)]) for number, answer in enumerate(self._answers)]

    def demonstrated(self) -> list[Message]:
        """Return the whole conversation with the right answers."""
        messages: list[Message] = []
        for asked, answer in zip(self._asked, self.solution(), strict=True):
            messages += [{"role": "user", "content": asked}, answer]
        return messages

    def state_key(self) -> str:
        """Return the number of the turn, as the key of the episode's state."""
        return f"turn {len(self._similarities) + 1}"


def similarity(content: str, answer: Sequence[str]) -> float:
    """Return `difflib`'s ratio between the given lines and the right lines, all of them stripped and in lower case.

    Example: if the right list is "a", the ratio of "B" is 0 and the ratio of "A" is 1. If the right list is "abcd", the
        ratio of "ab" is 2 * 2 / 6.
    """
    given = "\n".join(line.strip().lower() for line in content.split("\n") if line.strip())
    right = "\n".join(line.strip().lower() for line in answer)
    return difflib.SequenceMatcher(None, given, right).ratio() if given and right else 0.0


def _answer(lines: Sequence[str], tag: str) -> Message:
    return {"role": "assistant", "content": f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"}


def _key(name: str, by_first: bool) -> str:
    """Return the first or last name of a full name without a space: "AdaByron" has "Ada" and "Byron"."""
    cut = next((i for i in range(1, len(name)) if name[i].isupper()), len(name))
    return name[:cut] if by_first else name[cut:]


def _lists_of(source: str | None) -> list[Sequence[str]]:
    if source is None:
        rng = random.Random("alphabet_sort_tags")
        return [[f"{rng.choice(FIRST)} {rng.choice(LAST)}" for _ in range(30)] for _ in range(1000)]
    if source.endswith(".jsonl"):
        rows = [row.get("names") for row in read_json_lines(Path(source), "list of names").values()]
    else:
        rows = [example.payload.get("names") for example in HuggingFaceExamples(source)]
    for number, names in enumerate(rows, start=1):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{source}, row {number}: names is {names!r:.80}; expected a list of names")
    return rows  # type: ignore[return-value]
