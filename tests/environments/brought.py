"""What people bring: classes and functions as they are written for other trainers, which import nothing of ours."""

from __future__ import annotations

import random
import zlib
from typing import ClassVar


class Vault:
    """As TRL's `environment_factory` takes it: a number is to be found."""

    closed: ClassVar[list[int]] = []

    def __init__(self, limit: int = 3):
        self.limit, self.reward, self.done = limit, 0.0, False

    def reset(self, **kwargs) -> str | None:
        self.code, self.tries = int(kwargs["code"]), 0
        return f" The code is below {kwargs['code'] + 2}."

    def enter(self, code: int) -> str:
        """
        Enter a code.

        Args:
            code: The code to try.

        Returns:
            What the vault says.
        """
        if code < 0:
            raise ValueError("codes are not negative")
        self.tries += 1
        self.reward = float(code == self.code)
        self.done = self.reward == 1.0 or self.tries == self.limit
        return "open" if self.reward else "closed"

    async def hint(self) -> str:
        """Ask for a hint."""
        return "even" if self.code % 2 == 0 else "odd"

    def close(self) -> None:
        self.closed.append(self.tries if hasattr(self, "tries") else -1)


class Scored:
    """`reset` names a seed and gives the whole task; `get_reward` owns the reward."""

    def reset(self, seed: int) -> str:
        self.number, self.said = random.Random(seed).randrange(10), None
        return f"Say {self.number} with the tool."

    def say(self, number: int) -> str:
        """Say a number.

        Args:
            number: The number.
        """
        self.said = number
        return "heard"

    def get_reward(self) -> float:
        return 1.0 if self.said == self.number else 0.0


class Silent(Scored):
    get_reward = None

    def reset(self, **kwargs):
        self.number = 0


class NoTools:
    reward = 0.0

    def reset(self, **kwargs): ...


class Untyped(Scored):
    def look(self, at):
        """Look."""
        return ""


class HotCold:
    """A Gymnasium-style text environment."""

    def __init__(self, size: int = 9):
        self.size = size

    def reset(self, *, seed=None, options=None):
        self.target, self.left = random.Random(seed).randint(1, self.size), 3
        return f"A number from 1 to {self.size}?", {}

    def step(self, action):
        self.left -= 1
        guess = int(action) if action.strip().isdigit() else 0
        right = guess == self.target
        return "warm" if abs(guess - self.target) < 3 else "cold", float(right), right, self.left == 0, {}


def luck(text):
    """A number for any text: what a tiny model says earns something different in every episode."""
    return zlib.crc32(text.encode()) % 100 / 100


def lucky(completion):
    return luck(completion)


class Lucky(HotCold):
    def step(self, action):
        return "again", luck(action), False, False, {}


class OldGym(HotCold):
    def step(self, action):
        return super().step(action)[:4]


class Pixels(HotCold):
    closed: ClassVar[list[str]] = []

    def close(self):
        self.closed.append("closed")

    def reset(self, *, seed=None, options=None):
        return [0, 1, 2], {}


def make_game(size: int = 4):
    return Lucky(size)


def exact(completion, answer):
    return float(completion.strip() == answer)


async def lengths(completions, answer, **kwargs):
    """As TRL calls it, with lists."""
    assert len(completions) == len(answer) == len(kwargs["prompts"]) == 1
    text = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    return [len(text) / 10]


def num_said(completions, **kwargs):
    """How many messages TRL's functions are given; those of the prompt are none of them."""
    return [float(len(completions[0]))]


def with_prompts(prompts: str):
    """A function that makes an environment, with a parameter that TRL's reward functions have too."""
    return Lucky(len(prompts))


def parts(completion, **columns):
    return {"short": 0.5, "polite": 0.25 * ("please" in completion)}


def not_mine(completions, **kwargs):
    return [None for _ in completions]


def no_list(completions, **kwargs):
    return 1.0


def solved(environments, completions, **kwargs):
    assert completions[0][0]["role"] == "assistant"
    return [2 * environment.reward for environment in environments]


def wrong_names(text, target):
    return 1.0


class Half:
    def examples(self, split): ...
