"""A conversation of three user turns. In each, the user says a word, and the model must answer with its opposite.

An environment consists of messages and a reward, never of token ids. Replace the words by your own conversation, and
run `verbatim env check my_env:MyEnv` after each change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from verbatim import Example, Message, Trajectory
from verbatim.environments import Demonstration, Episode, Reply

OPPOSITES = {"hot": "cold", "big": "small", "old": "new", "wet": "dry"}
ROUNDS = 3


class MyEpisode(Episode):
    """One conversation. Everything that changes while it runs belongs here, so that episodes do not share it."""

    # The rewards of the turns (see `reply`) add up to the score. This tells Verbatim not to count them twice.
    turn_rewards_sum_to_reward = True

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.right = words, list[bool]()
        # The messages that the model reads first.
        self.messages = [
            {"role": "system", "content": "Answer with the opposite."},
            {"role": "user", "content": words[0]},
        ]

    async def reply(self, message: Message) -> Reply:
        """Return the user's reply to a message of the model: the next word, or the end of the episode."""
        answer = self.answer(message["content"])
        share = self.right[-1] / ROUNDS
        return Reply(messages=answer, reward=share) if answer else Reply(done=True, reward=share)

    def answer(self, text: str) -> list[Message]:
        """Record whether the answer was right. Return the next user message, or no message after the last word."""
        self.right.append(text.strip() == OPPOSITES[self.words[len(self.right)]])
        return [{"role": "user", "content": word} for word in self.words[len(self.right) :][:1]]

    async def score(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Return the reward of the episode: a number, or named parts, whose sum is the reward. 1 counts as a
        success."""
        return {f"round_{n + 1}": float(n < len(self.right) and self.right[n]) / ROUNDS for n in range(ROUNDS)}

    def solution(self) -> list[Message]:
        """Return the messages of a perfect agent. `verbatim env check` plays them, to make sure that success is
        possible."""
        return [{"role": "assistant", "content": OPPOSITES[word]} for word in self.words]


class MyEnv:
    """The environment: provides examples, and starts an episode for each."""

    def examples(self, split: str) -> list[Example]:
        """Return the tasks of "train" or "eval". They differ, so that evaluations use tasks that were not trained
        on."""
        drawn = [list(words) for words in itertools.permutations(OPPOSITES, ROUNDS)]
        random.Random(0).shuffle(drawn)
        chosen = drawn[:16] if split == "train" else drawn[16:]
        return [Example(id="-".join(words), payload={"words": words}) for words in chosen]

    async def start(self, example: Example, seed: int) -> MyEpisode:
        """Start a new episode. If anything in it is random, draw it from random.Random(seed)."""
        return MyEpisode(example.payload["words"])

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return conversations to imitate before reinforcement learning. Only a model made by [model.build] needs them.

        They show what an answer looks like, but not good play: half of the time the answer is the right word, and
        otherwise it is any of the opposites.
        """
        rng = random.Random(seed)
        return [Demonstration(messages=list(self._demonstration(rng))) for _ in range(count)]

    def _demonstration(self, rng: random.Random) -> Iterator[Message]:
        episode = MyEpisode(rng.sample(list(OPPOSITES), ROUNDS))
        said: list[Message] = list(episode.messages)
        while said:
            yield from said
            right = OPPOSITES[episode.words[len(episode.right)]]
            guess = right if rng.random() < 0.5 else rng.choice(list(OPPOSITES.values()))
            yield {"role": "assistant", "content": guess}
            said = episode.answer(guess)
